"""The dispatcher for tokens that every rank of an expert-model-parallel block holds already: nothing goes out."""

from __future__ import annotations

from torch import Tensor

from ds_etp.dispatch.base import DispatchOutput, TokenDispatcher
from ds_etp.parallel import autograd as c


class Replicated(TokenDispatcher):
    """Needs `tp` to be a multiple of `ep * etp`; every shape is known, so nothing is exchanged but rows.

    Where a tensor-parallel group holds several blocks, each takes its share of the tokens, and the results
    are gathered over the tensor-parallel group.
    """

    knows_shapes = True

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, *, with_sentinels: bool = False) -> DispatchOutput:
        """See `TokenDispatcher.dispatch`. Forward: no message."""
        tp, block, tokens = self.groups.tp, self.groups.expert_model_parallel, len(x)
        if tp.size == block.size:
            return self._to_local(x, index, weights, tokens, with_sentinels=with_sentinels, copied=block)
        x, index, weights = c.slice_replicated(tp, block, x, index, weights, reduce_dtype=self.reduce_dtype)
        return self._to_local(x, index, weights, tokens, with_sentinels=with_sentinels)

    def combine(self, partial: Tensor, rows: DispatchOutput, overlap_fn: c.OverlapFn = None) -> Tensor:
        """See `TokenDispatcher.combine`. Forward: an all-reduce, or a reduce-scatter and an all-gather over tp."""
        tp, block, dtype = self.groups.tp, self.groups.expert_model_parallel, partial.dtype
        if tp.size == block.size and overlap_fn is None:
            return self._from_local(partial, rows, copied=block).to(dtype)
        partial = self._from_local(partial, rows)
        if tp.size == block.size:
            return c.reduce_from_group(block, partial, reduce_dtype=self.reduce_dtype, overlap_fn=overlap_fn).to(dtype)
        return c.reduce_scatter_all_gather(
            tp, block, rows.tokens, partial, reduce_dtype=self.reduce_dtype, overlap_fn=overlap_fn
        ).to(dtype)
