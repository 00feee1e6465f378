"""Experts that are not called as `experts(x [T, H], index [T, K], weights [T, K])`, or hold more than weights.

Legend: T tokens, H hidden size, E experts, e experts on this rank, n rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_etp.experts.sharded import ShardedExperts


class ExpertMajorRows(ShardedExperts):
    """For experts called with all tokens once for each expert: `[E * T, H]`, expert by expert (llama4).

    Their block has multiplied each row with its router score before, and that is 0 for an expert that a token didn't
    choose. Rows of zeros give zeros, and no gradient reaches anything through a score of 0, so they stay at home.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Rows `[E * T, H]` to `[E * T, H]`."""
        rows = (hidden_states != 0).any(-1).nonzero()[:, 0]
        tokens = max(len(hidden_states) // self.ds_etp_shard.layout.num_experts, 1)
        weights = hidden_states.new_ones(len(rows), 1)
        out = super().forward(hidden_states[rows], (rows // tokens)[:, None], weights)
        return torch.zeros_like(hidden_states).index_copy(0, rows, out)

    def local_experts_forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `ShardedExperts.local_experts_forward`: the family wants as many rows for each expert."""
        experts = self.ds_etp_shard.layout.num_experts // self.ds_etp_shard.topology.ep
        order = index[:, 0].argsort(stable=True)
        counts = torch.bincount(index[:, 0], minlength=experts)
        longest = int(counts.max())
        expert = index[order, 0]
        place = torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[expert]
        slots = torch.empty_like(expert).index_copy(0, order, expert * longest + place)
        padded = x.new_zeros(experts * longest, x.shape[1]).index_copy(0, slots, x)
        partial: Tensor = super(ShardedExperts, self).forward(padded)  # type: ignore[misc]
        return partial[slots] * weights


class IdentityExperts(ShardedExperts):
    """For experts of which those from E on return their input (longcat_flash's zero-computation experts).

    A token stays where it is for those, so that they count once, and nothing of them crosses a link.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """See `ShardedExperts.forward`."""
        identity = top_k_index >= self.ds_etp_shard.layout.num_experts
        own = (top_k_weights * identity).sum(-1, keepdim=True).to(hidden_states.dtype)
        # Somewhere they have to go: to an expert that the token has chosen, where it has chosen one.
        chosen = torch.where(identity, -1, top_k_index).amax(-1, keepdim=True).clamp(min=0)
        index = torch.where(identity, chosen, top_k_index)
        weights = top_k_weights.masked_fill(identity, 0)
        routed = super().forward(hidden_states, index, weights, router_index=top_k_index)
        return routed + hidden_states * own

    def local_experts_forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `ShardedExperts`: the family's own fails for one expert a token (transformers 5.0 to 5.24)."""
        if index.shape[1] == 1:
            layout = self.ds_etp_shard.layout
            last = layout.num_experts + layout.spare_experts - 1
            other = torch.full_like(index, last) if layout.spare_experts else index
            index, weights = torch.cat([index, other], 1), torch.cat([weights, torch.zeros_like(weights)], 1)
        return super().local_experts_forward(x, index, weights)
