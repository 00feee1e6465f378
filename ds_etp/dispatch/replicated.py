"""The plan for tokens that every rank of an expert-model-parallel block holds already: nothing goes out."""

from __future__ import annotations

from torch import Tensor

from ds_etp.dispatch.base import BasePlan, Rows
from ds_etp.parallel import autograd as c


class Replicated(BasePlan):
    """Needs `tp` to be a multiple of `ep * etp`; every shape is known, so nothing is exchanged but rows.

    Where a tensor-parallel group holds several blocks, each takes its share of the tokens, and the results
    are gathered over the tensor-parallel group.
    """

    knows_shapes = True

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, *, marked: bool = False) -> Rows:
        """See `Plan.dispatch`. Forward: no message."""
        tp, block, tokens = self.groups.tp, self.groups.expert_model_parallel, len(x)
        if tp.size == block.size:
            return self._to_local(x, index, weights, tokens, marked=marked, copied=block)
        x, index, weights = c.share(tp, block, x, index, weights, reduce_dtype=self.reduce_dtype)
        return self._to_local(x, index, weights, tokens, marked=marked)

    def combine(self, partial: Tensor, rows: Rows, meanwhile: c.Meanwhile = None) -> Tensor:
        """See `Plan.combine`. Forward: an all-reduce, or a reduce-scatter and an all-gather over tp."""
        tp, block, dtype = self.groups.tp, self.groups.expert_model_parallel, partial.dtype
        if tp.size == block.size and meanwhile is None:
            return self._from_local(partial, rows, copied=block).to(dtype)
        partial = self._from_local(partial, rows)
        if tp.size == block.size:
            return c.all_reduce(block, partial, reduce_dtype=self.reduce_dtype, meanwhile=meanwhile).to(dtype)
        return c.unshare(tp, block, rows.tokens, partial, reduce_dtype=self.reduce_dtype, meanwhile=meanwhile).to(dtype)
