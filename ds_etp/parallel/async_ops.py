"""Asynchronous collectives that overlap with compute.

`run_overlapped` starts one collective of a linear op, runs `overlap_fn`, then waits. Backward mirrors it: autograd runs
nodes in reverse creation order, so `overlap_fn`'s backward runs while the transposed collective is in flight.

All tensors are rows: `[rows, ...]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ds_etp.parallel.collectives import (
    all_gather_single,
    balanced_splits,
    block_rows,
    block_sizes,
    pad_rows,
    padded,
    reduce_scatter_rows,
    reduce_scatter_single,
    unpadded,
)
from ds_etp.parallel.process_groups import ProcessGroupInfo


class AsyncWork:
    """A collective in flight. It holds its tensors until it has completed.

    Work that is never waited for, because `overlap_fn` has failed, asks nothing of anyone: peers get what was sent.
    torch's checkpoints end a recomputation in that way too.
    """

    def __init__(self, work: Any, sent: Tensor, out: Tensor, finish: Callable[[Tensor], Tensor]) -> None:
        self._work, self._sent, self._out, self._finish = work, sent, out, finish

    def wait(self) -> Tensor:
        """What arrived. On CUDA the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        return self._finish(self._out)

    def drop(self) -> None:
        """Forgets what arrives. Memory of its tensors may be used again only after it, on CUDA; the host goes on."""
        if self._work is not None and self._sent.is_cuda:
            self._work.wait()


def completed(tensor: Tensor) -> AsyncWork:
    """No message: what was sent is what arrives."""
    return AsyncWork(None, tensor, tensor, lambda out: out)


def start_all_reduce(tensor: Tensor, peers: ProcessGroupInfo, dtype: torch.dtype | None) -> AsyncWork:
    """As `collectives.all_reduce_rows`, of one tensor."""
    message = tensor.contiguous().to(dtype or tensor.dtype, copy=True)
    work = dist.all_reduce(message, group=peers.group, async_op=True)
    return AsyncWork(work, message, message, lambda out: out.to(tensor.dtype))


def start_reduce_scatter(
    tensor: Tensor, sizes: Sequence[int], peers: ProcessGroupInfo, dtype: torch.dtype | None
) -> AsyncWork:
    """As `collectives.reduce_scatter_rows`, of one tensor."""
    longest, own = max(sizes), sizes[peers.index]
    message = padded(tensor.to(dtype or tensor.dtype).contiguous(), sizes)
    out = message.new_empty(longest, *message.shape[1:])
    work = reduce_scatter_single(out, message, group=peers.group, async_op=True)
    return AsyncWork(work, message, out, lambda out: out[:own].to(tensor.dtype))


def start_all_gather(tensor: Tensor, sizes: Sequence[int], peers: ProcessGroupInfo) -> AsyncWork:
    """As `collectives.all_gather_rows`, of one tensor."""
    longest = max(sizes)
    message = pad_rows(tensor.contiguous(), longest)
    out = message.new_empty(longest * peers.size, *message.shape[1:])
    work = all_gather_single(out, message, group=peers.group, async_op=True)
    return AsyncWork(work, message, out, lambda out: unpadded(out, sizes))


def start_all_to_all(
    tensor: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], peers: ProcessGroupInfo
) -> AsyncWork:
    """As `collectives.all_to_all_rows`, of one tensor."""
    message = tensor.contiguous()
    out = message.new_empty(sum(output_splits), *message.shape[1:])
    work = dist.all_to_all_single(
        out, message, list(output_splits), list(input_splits), group=peers.group, async_op=True
    )
    return AsyncWork(work, message, out, lambda out: out)


class OverlappedOp(ABC):
    """A linear op split around one async collective.

    `start` launches it, `finish` turns the received buffer into the result; the `_backward` pair is its transpose.
    """

    work: AsyncWork | None = None

    @abstractmethod
    def start(self, tensor: Tensor) -> AsyncWork:
        """Starts the message."""

    def finish(self, tensor: Tensor) -> Tensor:
        """From what arrived to the result."""
        return tensor

    @abstractmethod
    def start_backward(self, grad: Tensor) -> AsyncWork:
        """Starts the message of the transpose, with the gradient of the result."""

    def finish_backward(self, tensor: Tensor) -> Tensor:
        """From what arrived of it to the gradient of what `start` was given."""
        return tensor

    def set_work(self, work: AsyncWork) -> None:
        """Notes the work in flight."""
        self.work = work

    def wait_for_work(self) -> Tensor:
        """What arrived."""
        work, self.work = self.work, None
        assert work is not None
        return work.wait()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, op: OverlappedOp, tensor: Tensor) -> Tensor:
        ctx.op = op
        op.set_work(op.start(tensor))
        return tensor.new_empty(0)  # the rows are in flight: an empty tensor that ties the two ends

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return None, ctx.op.finish_backward(ctx.op.wait_for_work())


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, op: OverlappedOp, token: Tensor) -> Tensor:
        ctx.op = op
        return op.finish(op.wait_for_work())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.op.set_work(ctx.op.start_backward(grad))
        return None, grad.new_empty(0)


def run_overlapped(op: OverlappedOp, tensor: Tensor, overlap_fn: Callable[[], None]) -> Tensor:
    """The result of `op`, with `overlap_fn` run while its collective is in flight, and backward likewise."""
    token = _Start.apply(op, tensor)
    try:
        overlap_fn()
    except BaseException:
        if op.work is not None:
            op.work.drop()
        raise
    result: Tensor = _Finish.apply(op, token)
    return result


class OverlappedReduceScatter(OverlappedOp):
    """`autograd.reduce_scatter`: both collectives overlap."""

    def __init__(self, peers: ProcessGroupInfo, sizes: Sequence[int], dtype: torch.dtype | None) -> None:
        self.peers, self.sizes, self.dtype = peers, sizes, dtype

    def start(self, tensor: Tensor) -> AsyncWork:
        return start_reduce_scatter(tensor, self.sizes, self.peers, self.dtype)

    def start_backward(self, grad: Tensor) -> AsyncWork:
        return start_all_gather(grad, self.sizes, self.peers)


class OverlappedReduceScatterAllGather(OverlappedOp):
    """`autograd.reduce_scatter_all_gather`: of its two messages the all-gather overlaps, which is no smaller."""

    def __init__(
        self, tp_peers: ProcessGroupInfo, expert_peers: ProcessGroupInfo, rows: int, dtype: torch.dtype | None
    ) -> None:
        self.tp_peers, self.expert_peers, self.dtype = tp_peers, expert_peers, dtype
        self.sizes = balanced_splits(rows, tp_peers.size)

    def start(self, tensor: Tensor) -> AsyncWork:
        sizes = block_sizes(self.tp_peers, self.expert_peers, self.sizes)
        return start_all_gather(
            reduce_scatter_rows([tensor], sizes, self.expert_peers, self.dtype)[0], self.sizes, self.tp_peers
        )

    def start_backward(self, grad: Tensor) -> AsyncWork:
        start, stop = block_rows(self.tp_peers, self.expert_peers, self.sizes)
        return completed(grad[start:stop])


class OverlappedAllReduce(OverlappedOp):
    """`autograd.reduce_from_group`, whose transpose sends nothing."""

    def __init__(self, peers: ProcessGroupInfo, dtype: torch.dtype | None) -> None:
        self.peers, self.dtype = peers, dtype

    def start(self, tensor: Tensor) -> AsyncWork:
        return start_all_reduce(tensor, self.peers, self.dtype)

    def start_backward(self, grad: Tensor) -> AsyncWork:
        return completed(grad)
