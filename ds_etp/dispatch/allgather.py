"""The dispatcher in which every rank of an expert-model-parallel block gets all of the block's tokens."""

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
        """See `TokenDispatcher.dispatch`. Forward: sizes, unless known, and an all-gather over the block."""
        groups, tokens = self.groups, len(x)
        sizes = self._sizes(tokens, x.device)
        x, index, weights = c.scatter_to_tp(groups.tp, x, index, weights)
        index_dtype, index = index.dtype, index.to(torch.int32)  # half the bytes on the wire
        block = groups.expert_model_parallel
        x, index, weights = c.all_gather(block, sizes, x, index, weights, reduce_dtype=self.reduce_dtype)
        return self._to_local(x, index.to(index_dtype), weights, tokens, with_sentinels=with_sentinels, handle=sizes)

    def combine(self, partial: Tensor, rows: DispatchOutput, overlap_fn: c.OverlapFn = None) -> Tensor:
        """See `TokenDispatcher.combine`. Forward: a reduce-scatter over the block, and an all-gather over tp."""
        y = self._from_local(partial, rows)
        block = self.groups.expert_model_parallel
        y = c.reduce_scatter(block, rows.handle, y, reduce_dtype=self.reduce_dtype, overlap_fn=overlap_fn)
        return c.gather_from_tp(self.groups.tp, rows.tokens, y.to(partial.dtype))

    def _sizes(self, tokens: int, device: torch.device) -> list[int]:
        """How many tokens each rank of the block owns.

        Raises:
            RuntimeError: on every rank of the block, where batches that were promised to be equal are not.
        """
        groups, block = self.groups, self.groups.expert_model_parallel
        tp = groups.topology.tp
        expected = [balanced_splits(tokens, tp)[rank % tp] for rank in block.ranks]
        if block.size == 1 or (self.equal_batches and tokens in self._checked):
            return expected
        counts = torch.empty(block.size, dtype=torch.int64, device=device)
        all_gather_single(counts, torch.full((1,), tokens, device=device), group=block.group)
        batches: list[int] = counts.tolist()
        if self.equal_batches:
            if len(set(batches)) > 1:
                raise RuntimeError(
                    f"expert_tensor_parallel.equal_batches=True, but ranks {list(block.ranks)} bring {batches} tokens. "
                    "Pad batches to one length, or leave the key out."
                )
            self._checked |= {tokens}
        return [balanced_splits(batch, tp)[rank % tp] for batch, rank in zip(batches, block.ranks, strict=True)]
