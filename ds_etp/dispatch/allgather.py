"""All-gather dispatch: every expert rank gets the tokens of all of them.

Forward: all-gather over expert_model_parallel -> permute -> reduce-scatter -> all-gather over tp.
Legend as in `base`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_etp.dispatch.base import DispatchOutput, TokenDispatcher
from ds_etp.parallel import autograd as c
from ds_etp.parallel.collectives import all_gather_single, balanced_splits


class AllGather(TokenDispatcher):
    """For few expert ranks, or tokens that want most of them anyway: one message out and one back.

    With equal batches every shape is known. Without that promise ranks tell each other how many tokens they
    have, once per layer.
    """

    knows_shapes = True
    _checked: frozenset[int] = frozenset()

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, *, with_sentinels: bool = False) -> DispatchOutput:
        """See `TokenDispatcher.dispatch`. Forward: sizes, unless known, and an all-gather over the expert ranks."""
        groups, tokens = self.groups, len(x)
        sizes = self._sizes(tokens, x.device)
        x, index, weights = c.scatter_to_tp(groups.tp, x, index, weights)
        index_dtype, index = index.dtype, index.to(torch.int32)  # half the bytes to send
        expert_peers = groups.expert_model_parallel
        x, index, weights = c.all_gather(expert_peers, sizes, x, index, weights, reduce_dtype=self.reduce_dtype)
        return self._to_local(x, index.to(index_dtype), weights, tokens, with_sentinels=with_sentinels, handle=sizes)

    def combine(self, partial: Tensor, rows: DispatchOutput, overlap_fn: c.OverlapFn = None) -> Tensor:
        """See `TokenDispatcher.combine`. Forward: a reduce-scatter over the expert ranks, and an all-gather over tp."""
        y = self._from_local(partial, rows)
        expert_peers = self.groups.expert_model_parallel
        y = c.reduce_scatter(expert_peers, rows.handle, y, reduce_dtype=self.reduce_dtype, overlap_fn=overlap_fn)
        return c.gather_from_tp(self.groups.tp, rows.tokens, y.to(partial.dtype))

    def rows_sent(self, rows: DispatchOutput) -> int:
        """See `TokenDispatcher.rows_sent`."""
        sizes: list[int] = rows.handle
        return 2 * (len(sizes) - 1) * max(sizes)

    def _sizes(self, tokens: int, device: torch.device) -> list[int]:
        """How many tokens each expert rank owns.

        Raises:
            RuntimeError: on every expert rank, where batches that were promised to be equal are not.
        """
        groups, expert_peers = self.groups, self.groups.expert_model_parallel
        tp = groups.topology.tp
        expected = [balanced_splits(tokens, tp)[rank % tp] for rank in expert_peers.ranks]
        if expert_peers.size == 1 or (self.equal_batches and tokens in self._checked):
            return expected
        counts = torch.empty(expert_peers.size, dtype=torch.int64, device=device)
        all_gather_single(counts, torch.full((1,), tokens, device=device), group=expert_peers.group)
        batches: list[int] = counts.tolist()
        if self.equal_batches:
            if len(set(batches)) > 1:
                raise RuntimeError(
                    f"expert_tensor_parallel.equal_batches=True, but ranks {list(expert_peers.ranks)} bring {batches} "
                    "tokens. Pad batches to one length, or leave the key out."
                )
            self._checked |= {tokens}
        return [balanced_splits(batch, tp)[rank % tp] for batch, rank in zip(batches, expert_peers.ranks, strict=True)]
