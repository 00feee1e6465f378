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

from ds_etp.parallel.collectives import PackedAllReduce
from ds_etp.parallel.process_groups import ProcessGroupInfo


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any,
        peers: ProcessGroupInfo | None,
        dtype: torch.dtype | None,
        row: Tensor,
        k_index: Tensor,
        x: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.peers, ctx.dtype, ctx.models = peers, dtype, [(x.shape, x.dtype), (weights.shape, weights.dtype)]
        ctx.save_for_backward(row, k_index)
        return x.index_select(0, row), weights[row, k_index, None]

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        row, k_index = ctx.saved_tensors
        sums = PackedAllReduce(ctx.models, grad_x.device, ctx.dtype)
        x, weights = (part.zero_() for part in sums.parts)
        x.index_add_(0, row, grad_x.to(x.dtype))
        weights.index_put_((row, k_index), grad_weights[:, 0].to(weights.dtype))
        return None, None, None, None, *sums.over(ctx.peers)


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any, peers: ProcessGroupInfo | None, dtype: torch.dtype | None, row: Tensor, rows: int, tensor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row)
        sums = PackedAllReduce([(torch.Size([rows, *tensor.shape[1:]]), tensor.dtype)], tensor.device, dtype)
        total = sums.parts[0].zero_()
        total.index_add_(0, row, tensor.to(total.dtype))
        return sums.over(peers)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, grad.index_select(0, ctx.saved_tensors[0])


def permute(
    peers: ProcessGroupInfo | None,
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
        row, place: `[a]` each, this rank's own choice; no pair twice.
        reduce_dtype: what gradients are added up in; None for their own dtype.
    """
    rows, own = _Permute.apply(peers, reduce_dtype, row, k_index, x, weights)
    return rows, own


def unpermute(
    peers: ProcessGroupInfo | None, row: Tensor, rows: int, tensor: Tensor, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Permuted rows `[a, H]` added up at the `row` each belongs to: all `rows` rows, `[T, H]`, on every peer alike.

    The transpose of `permute`: `all_reduce` of sums that are made where they are sent from.
    """
    result: Tensor = _Unpermute.apply(peers, reduce_dtype, row, rows, tensor)
    return result
