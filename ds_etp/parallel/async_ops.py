"""Messages that travel while something else is computed.

`fly` is a linear map of rows, one message of which is started, and waited for only once `meanwhile` has run. Backward
is the mirror image: what `meanwhile` put into the graph was made between the two ends, and autograd runs nodes in the
reverse order in which they were made, so its backward runs while the message of the transpose travels.

Legend as in `rows`.
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
    block_rows,
    block_sizes,
    even_sizes,
    pad_rows,
    padded,
    reduce_scatter_rows,
    reduce_scatter_single,
    unpadded,
)
from ds_etp.parallel.process_groups import Peers


class Flight:
    """A message under way. It holds its tensors until it has landed.

    One that never lands, because what ran meanwhile has failed, asks nothing of anyone: peers get what was sent.
    torch's checkpoints end a recomputation in that way too.
    """

    def __init__(self, work: Any, sent: Tensor, out: Tensor, finish: Callable[[Tensor], Tensor]) -> None:
        self._work, self._sent, self._out, self._finish = work, sent, out, finish

    def land(self) -> Tensor:
        """What arrived. On CUDA the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        return self._finish(self._out)

    def abandon(self) -> None:
        """Forgets what arrives. Memory of its tensors may be used again only after it, on CUDA; the host goes on."""
        if self._work is not None and self._sent.is_cuda:
            self._work.wait()


def landed(tensor: Tensor) -> Flight:
    """No message: what was sent is what arrives."""
    return Flight(None, tensor, tensor, lambda out: out)


def start_all_reduce(tensor: Tensor, peers: Peers, dtype: torch.dtype | None) -> Flight:
    """As `rows.all_reduce_rows`, of one tensor."""
    message = tensor.contiguous().to(dtype or tensor.dtype, copy=True)
    work = dist.all_reduce(message, group=peers.group, async_op=True)
    return Flight(work, message, message, lambda out: out.to(tensor.dtype))


def start_reduce_scatter(tensor: Tensor, sizes: Sequence[int], peers: Peers, dtype: torch.dtype | None) -> Flight:
    """As `rows.reduce_scatter_rows`, of one tensor."""
    longest, own = max(sizes), sizes[peers.index]
    message = padded(tensor.to(dtype or tensor.dtype).contiguous(), sizes)
    out = message.new_empty(longest, *message.shape[1:])
    work = reduce_scatter_single(out, message, group=peers.group, async_op=True)
    return Flight(work, message, out, lambda out: out[:own].to(tensor.dtype))


def start_all_gather(tensor: Tensor, sizes: Sequence[int], peers: Peers) -> Flight:
    """As `rows.all_gather_rows`, of one tensor."""
    longest = max(sizes)
    message = pad_rows(tensor.contiguous(), longest)
    out = message.new_empty(longest * peers.size, *message.shape[1:])
    work = all_gather_single(out, message, group=peers.group, async_op=True)
    return Flight(work, message, out, lambda out: unpadded(out, sizes))


def start_all_to_all(tensor: Tensor, send: Sequence[int], receive: Sequence[int], peers: Peers) -> Flight:
    """As `rows.all_to_all_rows`, of one tensor."""
    message = tensor.contiguous()
    out = message.new_empty(sum(receive), *message.shape[1:])
    work = dist.all_to_all_single(out, message, list(receive), list(send), group=peers.group, async_op=True)
    return Flight(work, message, out, lambda out: out)


class Trip(ABC):
    """A linear map of rows in two halves, with a message between them; and its transpose, likewise."""

    flight: Flight | None = None

    @abstractmethod
    def out(self, tensor: Tensor) -> Flight:
        """Starts the message."""

    def arrive(self, tensor: Tensor) -> Tensor:
        """From what arrived to the result."""
        return tensor

    @abstractmethod
    def back(self, grad: Tensor) -> Flight:
        """Starts the message of the transpose, with the gradient of the result."""

    def arrive_back(self, tensor: Tensor) -> Tensor:
        """From what arrived of it to the gradient of what `out` was given."""
        return tensor

    def take_off(self, flight: Flight) -> None:
        """Notes what is under way."""
        self.flight = flight

    def touch_down(self) -> Tensor:
        """What arrived."""
        flight, self.flight = self.flight, None
        assert flight is not None
        return flight.land()


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, tensor: Tensor) -> Tensor:
        ctx.trip = trip
        trip.take_off(trip.out(tensor))
        return tensor.new_empty(0)  # the rows are under way: a token that ties the two ends

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return None, ctx.trip.arrive_back(ctx.trip.touch_down())


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, token: Tensor) -> Tensor:
        ctx.trip = trip
        return trip.arrive(trip.touch_down())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.trip.take_off(ctx.trip.back(grad))
        return None, grad.new_empty(0)


def fly(trip: Trip, tensor: Tensor, meanwhile: Callable[[], None]) -> Tensor:
    """The result of a trip. `meanwhile` runs while its message travels, backward while that of the transpose does."""
    token = _Depart.apply(trip, tensor)
    try:
        meanwhile()
    except BaseException:
        if trip.flight is not None:
            trip.flight.abandon()
        raise
    result: Tensor = _Arrive.apply(trip, token)
    return result


class ReduceScatterTrip(Trip):
    """`collectives.reduce_scatter`: both messages travel."""

    def __init__(self, peers: Peers, sizes: Sequence[int], dtype: torch.dtype | None) -> None:
        self.peers, self.sizes, self.dtype = peers, sizes, dtype

    def out(self, tensor: Tensor) -> Flight:
        return start_reduce_scatter(tensor, self.sizes, self.peers, self.dtype)

    def back(self, grad: Tensor) -> Flight:
        return start_all_gather(grad, self.sizes, self.peers)


class UnshareTrip(Trip):
    """`collectives.unshare`: of its two messages the one to all of `whole` travels, which is no smaller."""

    def __init__(self, whole: Peers, block: Peers, rows: int, dtype: torch.dtype | None) -> None:
        self.whole, self.block, self.dtype = whole, block, dtype
        self.sizes = even_sizes(rows, whole.size)

    def out(self, tensor: Tensor) -> Flight:
        sizes = block_sizes(self.whole, self.block, self.sizes)
        return start_all_gather(reduce_scatter_rows([tensor], sizes, self.block, self.dtype)[0], self.sizes, self.whole)

    def back(self, grad: Tensor) -> Flight:
        start, stop = block_rows(self.whole, self.block, self.sizes)
        return landed(grad[start:stop])


class AllReduceTrip(Trip):
    """`collectives.all_reduce`, whose transpose sends nothing."""

    def __init__(self, peers: Peers, dtype: torch.dtype | None) -> None:
        self.peers, self.dtype = peers, dtype

    def out(self, tensor: Tensor) -> Flight:
        return start_all_reduce(tensor, self.peers, self.dtype)

    def back(self, grad: Tensor) -> Flight:
        return landed(grad)
