"""Differentiable collectives over rows, in pairs that are exact transposes of each other.

Legend: T tokens a rank holds, t tokens it owns, H hidden size. All tensors are rows: `[rows, ...]`.

    op                        forward                               backward
    split   / unsplit         replicated -> own rows / the reverse  all-gather / slice
    gather  / reduce_scatter  own rows -> union / partial sums of   reduce-scatter / all-gather
                              the union -> own rows
    copy    / all_reduce      identity / partial sums -> total      all-reduce / identity
    share   / unshare         replicated -> own block's rows / the  reduce-scatter, all-gather / slice
                              block's partial sums -> replicated
    all_to_all                rows by send and receive counts       the reverse

Those that end an experts module take `meanwhile`, which runs while a message of theirs travels (`flights`).
None of them has a hidden factor: `<A x, y> = <x, A' y>` holds summed over the peers, which is what makes
every gradient arrive whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.parallel.async_ops import AllReduceTrip, ReduceScatterTrip, UnshareTrip, fly
from ds_etp.parallel.collectives import (
    all_gather_rows,
    all_reduce_rows,
    all_to_all_rows,
    block_rows,
    block_sizes,
    even_sizes,
    reduce_scatter_rows,
)
from ds_etp.parallel.process_groups import Peers

Meanwhile = Callable[[], None] | None


def _floating(tensors: Sequence[Tensor]) -> list[int]:
    return [place for place, tensor in enumerate(tensors) if tensor.is_floating_point()]


def _mark(ctx: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Notes which outputs have gradients. Expert indices travel with their rows but have none."""
    ctx.places = _floating(outputs)
    ctx.count = len(outputs)
    ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
    return outputs


def _spread(ctx: Any, grads: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Gradients of the floating tensors back in their places, None in the others."""
    spread: list[Tensor | None] = [None] * ctx.count
    for place, grad in zip(ctx.places, grads, strict=True):
        spread[place] = grad
    return spread


def _picked(ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [grad for place in ctx.places if (grad := grads[place]) is not None]


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.sizes = peers, even_sizes(len(tensors[0]), peers.size)
        start = sum(ctx.sizes[: peers.index])
        own = tuple(tensor[start : start + ctx.sizes[peers.index]].clone() for tensor in tensors)
        return _mark(ctx, own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *_spread(ctx, all_gather_rows(_picked(ctx, grads), ctx.sizes, ctx.peers)))


class _Unsplit(Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, rows: int, tensor: Tensor) -> Tensor:
        ctx.peers, ctx.sizes = peers, even_sizes(rows, peers.size)
        return all_gather_rows([tensor], ctx.sizes, peers)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        start = sum(ctx.sizes[: ctx.peers.index])
        return None, None, grad[start : start + ctx.sizes[ctx.peers.index]]


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: Peers, sizes: Sequence[int], dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.peers, ctx.sizes, ctx.dtype = peers, sizes, dtype
        return _mark(ctx, all_gather_rows(tensors, sizes, peers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        own = reduce_scatter_rows(_picked(ctx, grads), ctx.sizes, ctx.peers, ctx.dtype)
        return (None, None, None, *_spread(ctx, own))


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, sizes: Sequence[int], dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
        ctx.peers, ctx.sizes = peers, sizes
        return reduce_scatter_rows([tensor], sizes, peers, dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, all_gather_rows([grad], ctx.sizes, ctx.peers)[0]


class _Share(Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Peers, block: Peers, dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.whole, ctx.block, ctx.dtype = whole, block, dtype
        ctx.sizes = even_sizes(len(tensors[0]), whole.size)
        start, stop = block_rows(whole, block, ctx.sizes)
        return _mark(ctx, tuple(tensor[start:stop].clone() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        own = reduce_scatter_rows(
            _picked(ctx, grads), block_sizes(ctx.whole, ctx.block, ctx.sizes), ctx.block, ctx.dtype
        )
        return (None, None, None, *_spread(ctx, all_gather_rows(own, ctx.sizes, ctx.whole)))


class _Unshare(Function):
    @staticmethod
    def forward(ctx: Any, whole: Peers, block: Peers, rows: int, dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
        sizes = even_sizes(rows, whole.size)
        ctx.range = block_rows(whole, block, sizes)
        own = reduce_scatter_rows([tensor], block_sizes(whole, block, sizes), block, dtype)
        return all_gather_rows(own, sizes, whole)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        start, stop = ctx.range
        return None, None, None, None, grad[start:stop]


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.dtype = peers, dtype
        return _mark(ctx, tuple(tensor.view_as(tensor) for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *_spread(ctx, all_reduce_rows(_picked(ctx, grads), ctx.peers, ctx.dtype)))


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
        return all_reduce_rows([tensor], peers, dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, grad


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: Peers, send: Sequence[int], receive: Sequence[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.peers, ctx.send, ctx.receive = peers, send, receive
        return _mark(ctx, all_to_all_rows(tensors, send, receive, peers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        back = all_to_all_rows(_picked(ctx, grads), ctx.receive, ctx.send, ctx.peers)
        return (None, None, None, *_spread(ctx, back))


def split(peers: Peers, *tensors: Tensor) -> tuple[Tensor, ...]:
    """This rank's rows of tensors that every peer holds alike: `[T, ...]` to `[t, ...]`."""
    return tuple(_Split.apply(peers, *tensors)) if peers.size > 1 else tensors


def unsplit(peers: Peers, rows: int, tensor: Tensor) -> Tensor:
    """All `rows` rows, on every peer alike, of a tensor of own rows: `[t, ...]` to `[T, ...]`."""
    result: Tensor = _Unsplit.apply(peers, rows, tensor) if peers.size > 1 else tensor
    return result


def gather(
    peers: Peers, sizes: Sequence[int], *tensors: Tensor, reduce_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Every peer's own rows, in peer order. Peer i brings `sizes[i]` rows; sums back in `reduce_dtype`."""
    return tuple(_Gather.apply(peers, sizes, reduce_dtype, *tensors)) if peers.size > 1 else tensors


def reduce_scatter(
    peers: Peers,
    sizes: Sequence[int],
    tensor: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
    meanwhile: Meanwhile = None,
) -> Tensor:
    """This rank's `sizes[index]` rows of the sum of the peers' partial results for the union of rows."""
    if meanwhile is not None and peers.size > 1:
        return fly(ReduceScatterTrip(peers, sizes, reduce_dtype), tensor, meanwhile)
    result: Tensor = _ReduceScatter.apply(peers, sizes, reduce_dtype, tensor) if peers.size > 1 else tensor
    return result


def share(whole: Peers, block: Peers, *tensors: Tensor, reduce_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The rows `block` owns together, of tensors that all of `whole` hold alike.

    `gather` over the block after `split` over the whole, without the message: the rows are here already.
    `block` is a run of neighbours in `whole`, each of which works on a different share of the same rows.
    """
    return tuple(_Share.apply(whole, block, reduce_dtype, *tensors))


def unshare(
    whole: Peers,
    block: Peers,
    rows: int,
    tensor: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
    meanwhile: Meanwhile = None,
) -> Tensor:
    """All `rows` rows, on every peer of `whole` alike, from partial results for the rows each block owns.

    `reduce_scatter` over the block and `unsplit` over the whole; but backward every peer has the gradients it
    needs, and sends nothing.
    """
    if meanwhile is not None:
        return fly(UnshareTrip(whole, block, rows, reduce_dtype), tensor, meanwhile)
    result: Tensor = _Unshare.apply(whole, block, rows, reduce_dtype, tensor)
    return result


def copy(peers: Peers, *tensors: Tensor, reduce_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Tensors every peer holds alike, about to be used for different shares of the work."""
    return tuple(_Copy.apply(peers, reduce_dtype, *tensors)) if peers.size > 1 else tensors


def all_reduce(
    peers: Peers, tensor: Tensor, *, reduce_dtype: torch.dtype | None = None, meanwhile: Meanwhile = None
) -> Tensor:
    """The sum of the peers' partial results, on every peer alike."""
    if meanwhile is not None and peers.size > 1:
        return fly(AllReduceTrip(peers, reduce_dtype), tensor, meanwhile)
    result: Tensor = _AllReduce.apply(peers, reduce_dtype, tensor) if peers.size > 1 else tensor
    return result


def all_to_all(peers: Peers, send: Sequence[int], receive: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Runs of rows to the peers, in peer order: `send[i]` rows to peer i, `receive[i]` rows from it."""
    return tuple(_AllToAll.apply(peers, send, receive, *tensors)) if peers.size > 1 else tensors
