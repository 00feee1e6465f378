"""Dispatch of tokens that all expert ranks hold already, as tensor-parallel peers: nothing is sent out.

Forward: permute -> unpermute, summed by an all-reduce. Legend as in `base`.
"""

from __future__ import annotations

from torch import Tensor

from ds_etp.dispatch.base import PLAIN, DispatchOptions, DispatchOutput, TokenDispatcher
from ds_etp.parallel import autograd as c
from ds_etp.parallel.collectives import balanced_splits, block_sizes


class Replicated(TokenDispatcher):
    """Needs `tp` to be a multiple of `ep * etp`; nothing is exchanged but rows.

    Where a tensor-parallel group holds several sets of the experts, each takes its share of the tokens, and the results
    are gathered over the tensor-parallel group.
    """

    def dispatch(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        options: DispatchOptions = PLAIN,
        again: DispatchOutput | None = None,
    ) -> DispatchOutput:
        """See `TokenDispatcher.dispatch`. Forward: no message."""
        tp, expert_peers, tokens = self.groups.tp, self.groups.expert_model_parallel, len(x)
        if tp.size == expert_peers.size:
            return self._to_local(x, index, weights, tokens, options, again=again, copied=expert_peers)
        x, index, weights = c.slice_replicated(tp, expert_peers, x, index, weights, reduce_dtype=self.reduce_dtype)
        return self._to_local(x, index, weights, tokens, options, again=again)

    def combine(self, partial: Tensor, rows: DispatchOutput, overlap_fn: c.OverlapFn = None) -> Tensor:
        """See `TokenDispatcher.combine`. Forward: an all-reduce, or a reduce-scatter and an all-gather over tp."""
        tp, expert_peers, dtype = self.groups.tp, self.groups.expert_model_parallel, partial.dtype
        if tp.size == expert_peers.size and overlap_fn is None:
            return self._from_local(partial, rows, copied=expert_peers).to(dtype)
        partial = self._from_local(partial, rows)
        if tp.size == expert_peers.size:
            return c.reduce_from_group(expert_peers, partial, reduce_dtype=self.reduce_dtype, overlap_fn=overlap_fn).to(
                dtype
            )
        return c.reduce_scatter_all_gather(
            tp, expert_peers, rows.tokens, partial, reduce_dtype=self.reduce_dtype, overlap_fn=overlap_fn
        ).to(dtype)

    def rows_sent(self, rows: DispatchOutput) -> int:
        """See `TokenDispatcher.rows_sent`."""
        tp, expert_peers = self.groups.tp, self.groups.expert_model_parallel
        sizes = balanced_splits(rows.tokens, tp.size)
        if tp.size == expert_peers.size:
            return (expert_peers.size - 1) * sizes[tp.index]
        return (expert_peers.size - 1) * max(block_sizes(tp, expert_peers, sizes))
