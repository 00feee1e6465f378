"""permute / unpermute for tokens replicated over a group.

    op          forward                                                     backward
    permute     replicated -> the (token, local expert) rows of this rank   scatter-add and all-reduce
    unpermute   those rows, summed by token and all-reduced                 gather

Exact transposes, as in `parallel.autograd`: `copy_to_group` and `reduce_from_group` with the choice of rows built in,
so that rows are added up in the message that is sent. Without peers there is none.

Legend: T tokens a rank holds, a pairs of this rank, H hidden size, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.dispatch.segments import Segments
from ds_etp.parallel.collectives import PackedAllReduce, all_reduce_in_place
from ds_etp.parallel.process_groups import ProcessGroupInfo


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any,
        peers: ProcessGroupInfo | None,
        dtype: torch.dtype | None,
        by_token: Segments,
        row: Tensor,
        k_index: Tensor,
        x: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.peers, ctx.dtype, ctx.models = peers, dtype, [(x.shape, x.dtype), (weights.shape, weights.dtype)]
        ctx.save_for_backward(row, k_index, by_token.order, by_token.offsets)
        return x.index_select(0, row), weights[row, k_index, None]

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        row, k_index, *by_token = ctx.saved_tensors
        sums = PackedAllReduce(ctx.models, grad_x.device, ctx.dtype)
        x, weights = sums.parts
        x.copy_(Segments(*by_token).sum(grad_x, x.dtype))
        weights.zero_()[row, k_index] = grad_weights[:, 0].to(weights.dtype)  # no pair occurs twice
        return None, None, None, None, None, *sums.over(ctx.peers)


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any,
        peers: ProcessGroupInfo | None,
        dtype: torch.dtype | None,
        by_token: Segments,
        row: Tensor,
        tensor: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(row)
        ctx.dtype = tensor.dtype
        total = by_token.sum(tensor, dtype)
        return total if peers is None else all_reduce_in_place(total, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, grad.index_select(0, ctx.saved_tensors[0]).to(ctx.dtype)


def permute(
    peers: ProcessGroupInfo | None,
    by_token: Segments,
    row: Tensor,
    k_index: Tensor,
    x: Tensor,
    weights: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`x[row]`, `[a, H]`, and `weights[row, k_index]`, `[a, 1]`, of `[T, H]` and `[T, K]` that every peer holds alike.

    Args:
        peers: None where nobody else holds them.
        by_token: `Segments.of(row, T)`.
        row, k_index: `[a]` each, this rank's own choice; no pair twice.
        reduce_dtype: what gradients are added up over the peers in; None for their own dtype.
    """
    rows, own = _Permute.apply(peers, reduce_dtype, by_token, row, k_index, x, weights)
    return rows, own


def unpermute(
    peers: ProcessGroupInfo | None,
    by_token: Segments,
    row: Tensor,
    tensor: Tensor,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Permuted rows `[a, H]` added up at the `row` each belongs to: `[T, H]`, on every peer alike.

    The transpose of `permute`: `reduce_from_group` of sums that are made where they are sent from. The result is in
    `reduce_dtype`, or the rows' own.
    """
    result: Tensor = _Unpermute.apply(peers, reduce_dtype, by_token, row, tensor)
    return result
