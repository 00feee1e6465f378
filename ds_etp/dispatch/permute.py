"""(token, local expert) pairs, picked from tokens that every peer holds and put back as sums of them all.

    op              forward                                   backward
    pick / put      replicated -> the rows this rank picks /  all-reduce / the picked rows
                    picked rows, summed by token -> total

Exact transposes, as in `collectives`: `copy` and `all_reduce` with the choice of rows built in, so that rows are
added up in the message that is sent. Without peers there is none.

Legend: T tokens a rank holds, a pairs of this rank, H hidden size, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.parallel.collectives import Sums
from ds_etp.parallel.process_groups import Peers


class _Pick(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: Peers | None, dtype: torch.dtype | None, row: Tensor, place: Tensor, x: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.peers, ctx.dtype, ctx.models = peers, dtype, [(x.shape, x.dtype), (weights.shape, weights.dtype)]
        ctx.save_for_backward(row, place)
        return x.index_select(0, row), weights[row, place, None]

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        row, place = ctx.saved_tensors
        sums = Sums(ctx.models, grad_x.device, ctx.dtype)
        x, weights = (part.zero_() for part in sums.parts)
        x.index_add_(0, row, grad_x.to(x.dtype))
        weights.index_put_((row, place), grad_weights[:, 0].to(weights.dtype))
        return None, None, None, None, *sums.over(ctx.peers)


class _Put(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: Peers | None, dtype: torch.dtype | None, row: Tensor, rows: int, tensor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row)
        sums = Sums([(torch.Size([rows, *tensor.shape[1:]]), tensor.dtype)], tensor.device, dtype)
        total = sums.parts[0].zero_()
        total.index_add_(0, row, tensor.to(total.dtype))
        return sums.over(peers)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, grad.index_select(0, ctx.saved_tensors[0])


def pick(
    peers: Peers | None,
    row: Tensor,
    place: Tensor,
    x: Tensor,
    weights: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`x[row]`, `[a, H]`, and `weights[row, place]`, `[a, 1]`, of `[T, H]` and `[T, K]` that every peer holds alike.

    Args:
        peers: None where nobody else holds them.
        row, place: `[a]` each, this rank's own choice; no pair twice.
        reduce_dtype: what gradients are added up in; None for their own dtype.
    """
    rows, own = _Pick.apply(peers, reduce_dtype, row, place, x, weights)
    return rows, own


def put(
    peers: Peers | None, row: Tensor, rows: int, tensor: Tensor, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Picked rows `[a, H]` added up at the `row` each belongs to: all `rows` rows, `[T, H]`, on every peer alike.

    The transpose of `pick`: `all_reduce` of sums that are made where they are sent from.
    """
    result: Tensor = _Put.apply(peers, reduce_dtype, row, rows, tensor)
    return result
