"""Differentiable collectives over rows, in pairs that are exact transposes of each other.

Legend: T tokens a rank holds, t tokens it owns, H hidden size. All tensors are rows: `[rows, ...]`.

    op                              forward                                backward
    scatter_to_tp                   replicated -> own rows                 all-gather
    gather_from_tp                  own rows -> replicated                 slice
    all_gather                      own rows -> union                      reduce-scatter
    reduce_scatter                  partial sums of the union -> own rows  all-gather
    copy_to_group                   identity                               all-reduce
    reduce_from_group               partial sums -> total                  identity
    slice_replicated                replicated -> the expert peers' rows   reduce-scatter, all-gather
    reduce_scatter_all_gather       their partial sums -> replicated       slice
    all_to_all                      rows by input and output splits        the reverse

Those that end an experts module take `overlap_fn`, which runs while a collective of theirs is in flight (`async_ops`).
None of them has a hidden factor: `<A x, y> = <x, A' y>` holds summed over the peers, which is what makes
every gradient arrive whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.parallel.async_ops import (
    OverlappedAllReduce,
    OverlappedReduceScatter,
    OverlappedReduceScatterAllGather,
    run_overlapped,
)
from ds_etp.parallel.collectives import (
    all_gather_rows,
    all_reduce_rows,
    all_to_all_rows,
    balanced_splits,
    block_rows,
    block_sizes,
    reduce_scatter_rows,
)
from ds_etp.parallel.process_groups import ProcessGroupInfo

OverlapFn = Callable[[], None] | None


def _floating(tensors: Sequence[Tensor]) -> list[int]:
    return [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]


def _mark_differentiable(ctx: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Notes which outputs have gradients. Expert indices travel with their rows but have none."""
    ctx.indices = _floating(outputs)
    ctx.count = len(outputs)
    ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
    return outputs


def _scatter_grads(ctx: Any, grads: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Gradients of the floating tensors back in their places, None in the others."""
    scattered: list[Tensor | None] = [None] * ctx.count
    for index, grad in zip(ctx.indices, grads, strict=True):
        scattered[index] = grad
    return scattered


def _floating_grads(ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [grad for index in ctx.indices if (grad := grads[index]) is not None]


class _ScatterToTP(Function):
    @staticmethod
    def forward(ctx: Any, peers: ProcessGroupInfo, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.sizes = peers, balanced_splits(len(tensors[0]), peers.size)
        start = sum(ctx.sizes[: peers.index])
        own = tuple(tensor[start : start + ctx.sizes[peers.index]].clone() for tensor in tensors)
        return _mark_differentiable(ctx, own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *_scatter_grads(ctx, all_gather_rows(_floating_grads(ctx, grads), ctx.sizes, ctx.peers)))


class _GatherFromTP(Function):
    @staticmethod
    def forward(ctx: Any, peers: ProcessGroupInfo, rows: int, tensor: Tensor) -> Tensor:
        ctx.peers, ctx.sizes = peers, balanced_splits(rows, peers.size)
        return all_gather_rows([tensor], ctx.sizes, peers)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        start = sum(ctx.sizes[: ctx.peers.index])
        return None, None, grad[start : start + ctx.sizes[ctx.peers.index]]


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: ProcessGroupInfo, sizes: Sequence[int], dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.peers, ctx.sizes, ctx.dtype = peers, sizes, dtype
        return _mark_differentiable(ctx, all_gather_rows(tensors, sizes, peers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        own = reduce_scatter_rows(_floating_grads(ctx, grads), ctx.sizes, ctx.peers, ctx.dtype)
        return (None, None, None, *_scatter_grads(ctx, own))


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: ProcessGroupInfo, sizes: Sequence[int], dtype: torch.dtype | None, tensor: Tensor
    ) -> Tensor:
        ctx.peers, ctx.sizes = peers, sizes
        return reduce_scatter_rows([tensor], sizes, peers, dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, all_gather_rows([grad], ctx.sizes, ctx.peers)[0]


class _SliceReplicated(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tp_peers: ProcessGroupInfo,
        expert_peers: ProcessGroupInfo,
        dtype: torch.dtype | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tp_peers, ctx.expert_peers, ctx.dtype = tp_peers, expert_peers, dtype
        ctx.sizes = balanced_splits(len(tensors[0]), tp_peers.size)
        start, stop = block_rows(tp_peers, expert_peers, ctx.sizes)
        return _mark_differentiable(ctx, tuple(tensor[start:stop].clone() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        own = reduce_scatter_rows(
            _floating_grads(ctx, grads),
            block_sizes(ctx.tp_peers, ctx.expert_peers, ctx.sizes),
            ctx.expert_peers,
            ctx.dtype,
        )
        return (None, None, None, *_scatter_grads(ctx, all_gather_rows(own, ctx.sizes, ctx.tp_peers)))


class _ReduceScatterAllGather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tp_peers: ProcessGroupInfo,
        expert_peers: ProcessGroupInfo,
        rows: int,
        dtype: torch.dtype | None,
        tensor: Tensor,
    ) -> Tensor:
        sizes = balanced_splits(rows, tp_peers.size)
        ctx.range = block_rows(tp_peers, expert_peers, sizes)
        own = reduce_scatter_rows([tensor], block_sizes(tp_peers, expert_peers, sizes), expert_peers, dtype)
        return all_gather_rows(own, sizes, tp_peers)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        start, stop = ctx.range
        return None, None, None, None, grad[start:stop]


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, peers: ProcessGroupInfo, dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.dtype = peers, dtype
        return _mark_differentiable(ctx, tuple(tensor.view_as(tensor) for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *_scatter_grads(ctx, all_reduce_rows(_floating_grads(ctx, grads), ctx.peers, ctx.dtype)))


class _ReduceFromGroup(Function):
    @staticmethod
    def forward(ctx: Any, peers: ProcessGroupInfo, dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
        return all_reduce_rows([tensor], peers, dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, grad


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: ProcessGroupInfo, input_splits: Sequence[int], output_splits: Sequence[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.peers, ctx.input_splits, ctx.output_splits = peers, input_splits, output_splits
        return _mark_differentiable(ctx, all_to_all_rows(tensors, input_splits, output_splits, peers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        back = all_to_all_rows(_floating_grads(ctx, grads), ctx.output_splits, ctx.input_splits, ctx.peers)
        return (None, None, None, *_scatter_grads(ctx, back))


def scatter_to_tp(peers: ProcessGroupInfo, *tensors: Tensor) -> tuple[Tensor, ...]:
    """This rank's rows of tensors that every peer holds alike: `[T, ...]` to `[t, ...]`."""
    return tuple(_ScatterToTP.apply(peers, *tensors)) if peers.size > 1 else tensors


def gather_from_tp(peers: ProcessGroupInfo, rows: int, tensor: Tensor) -> Tensor:
    """All `rows` rows, on every peer alike, of a tensor of own rows: `[t, ...]` to `[T, ...]`."""
    result: Tensor = _GatherFromTP.apply(peers, rows, tensor) if peers.size > 1 else tensor
    return result


def all_gather(
    peers: ProcessGroupInfo, sizes: Sequence[int], *tensors: Tensor, reduce_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Every peer's own rows, in peer order. Peer i brings `sizes[i]` rows; sums back in `reduce_dtype`."""
    return tuple(_AllGather.apply(peers, sizes, reduce_dtype, *tensors)) if peers.size > 1 else tensors


def reduce_scatter(
    peers: ProcessGroupInfo,
    sizes: Sequence[int],
    tensor: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
    overlap_fn: OverlapFn = None,
) -> Tensor:
    """This rank's `sizes[index]` rows of the sum of the peers' partial results for the union of rows."""
    if overlap_fn is not None and peers.size > 1:
        return run_overlapped(OverlappedReduceScatter(peers, sizes, reduce_dtype), tensor, overlap_fn)
    result: Tensor = _ReduceScatter.apply(peers, sizes, reduce_dtype, tensor) if peers.size > 1 else tensor
    return result


def slice_replicated(
    tp_peers: ProcessGroupInfo,
    expert_peers: ProcessGroupInfo,
    *tensors: Tensor,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The rows `expert_peers` owns together, of tensors that all of `tp_peers` hold alike.

    `all_gather` over the expert peers after `scatter_to_tp`, without the message: the rows are here already.
    `expert_peers` is a run of neighbours in `tp_peers`, each of which works on a different share of the same rows.
    """
    return tuple(_SliceReplicated.apply(tp_peers, expert_peers, reduce_dtype, *tensors))


def reduce_scatter_all_gather(
    tp_peers: ProcessGroupInfo,
    expert_peers: ProcessGroupInfo,
    rows: int,
    tensor: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
    overlap_fn: OverlapFn = None,
) -> Tensor:
    """All `rows` rows, on every peer of `tp_peers` alike, from partial results of the expert peers.

    `reduce_scatter` over the expert peers and `gather_from_tp`; but backward every peer has the gradients it
    needs, and sends nothing.
    """
    if overlap_fn is not None:
        return run_overlapped(
            OverlappedReduceScatterAllGather(tp_peers, expert_peers, rows, reduce_dtype), tensor, overlap_fn
        )
    result: Tensor = _ReduceScatterAllGather.apply(tp_peers, expert_peers, rows, reduce_dtype, tensor)
    return result


def copy_to_group(
    peers: ProcessGroupInfo, *tensors: Tensor, reduce_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Tensors every peer holds alike, about to be used for different shares of the work."""
    return tuple(_CopyToGroup.apply(peers, reduce_dtype, *tensors)) if peers.size > 1 else tensors


def reduce_from_group(
    peers: ProcessGroupInfo, tensor: Tensor, *, reduce_dtype: torch.dtype | None = None, overlap_fn: OverlapFn = None
) -> Tensor:
    """The sum of the peers' partial results, on every peer alike."""
    if overlap_fn is not None and peers.size > 1:
        return run_overlapped(OverlappedAllReduce(peers, reduce_dtype), tensor, overlap_fn)
    result: Tensor = _ReduceFromGroup.apply(peers, reduce_dtype, tensor) if peers.size > 1 else tensor
    return result


def all_to_all(
    peers: ProcessGroupInfo, input_splits: Sequence[int], output_splits: Sequence[int], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Runs of rows to the peers, in peer order: `input_splits[i]` rows to peer i, `output_splits[i]` rows from it."""
    return tuple(_AllToAll.apply(peers, input_splits, output_splits, *tensors)) if peers.size > 1 else tensors
