"""Experts that are not called as `experts(x [T, H], index [T, K], weights [T, K])`, or hold more than weights.

Legend: T tokens, H hidden size, E experts, e experts on this rank, n rows, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.dispatch.base import DispatchOutput
from ds_etp.experts.sharded import ShardedExperts
from ds_etp.parallel.host import to_host


class _Select(Function):
    """Rows, none of them twice: backward puts gradients in their places, and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = tensor.shape
        return tensor.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None


def _select(tensor: Tensor, rows: Tensor) -> Tensor:
    selected: Tensor = _Select.apply(tensor, rows)
    return selected


class ExpertMajorRows(ShardedExperts):
    """For experts called with all tokens once for each expert: `[E * T, H]`, expert by expert (llama4).

    Their block has multiplied each row with its router score before, and that is 0 for an expert that a token didn't
    choose. Rows of zeros give zeros, and no gradient reaches anything through a score of 0, so they stay at home.
    """

    ds_etp_needs_counts = True

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Rows `[E * T, H]` to `[E * T, H]`."""
        tokens = max(len(hidden_states) // self.ds_etp_shard.layout.num_experts, 1)
        chosen = (hidden_states != 0).any(-1)
        rows = self._chosen_rows(chosen)
        weights = chosen[rows, None].to(hidden_states.dtype)
        out = super().forward(_select(hidden_states, rows), (rows // tokens)[:, None], weights)
        return torch.zeros_like(hidden_states).index_copy(0, rows, out)

    def _chosen_rows(self, chosen: Tensor) -> Tensor:
        """The rows that are not zeros, of `[E * T]`; K of each token, some of zeros if it has fewer, where K is known.

        Otherwise the host has to wait for their number.
        """
        experts, count = self.ds_etp_shard.layout.num_experts, self.ds_etp_shard.experts_per_token
        if count is None or count >= experts:
            return chosen.nonzero()[:, 0] if count is None else torch.arange(len(chosen), device=chosen.device)
        by_token = chosen.view(experts, -1).t()
        # Should never be: the block's router gives K scores, all others are 0. More would be lost in silence.
        torch._assert_async((by_token.sum(1) <= count).all(), f"a token has rows for more than {count} experts")
        expert = by_token.int().sort(dim=1, descending=True, stable=True).indices[:, :count]
        token = torch.arange(len(by_token), device=chosen.device)
        return (expert * len(by_token) + token[:, None]).flatten()

    def forward_rows(self, rows: DispatchOutput) -> Tensor:
        """See `ShardedExperts.forward_rows`: the family wants as many rows for each expert."""
        assert rows.counts is not None
        return self._padded_forward(rows.x, rows.index, rows.weights, max(*rows.counts, 1))

    def local_experts_forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `ShardedExperts.local_experts_forward`. The host waits for the longest expert's rows."""
        experts = self.ds_etp_shard.layout.num_experts // self.ds_etp_shard.topology.ep
        numbers = torch.arange(experts, device=x.device)
        longest = to_host((index == numbers).sum(0).amax(0, keepdim=True))
        return self._padded_forward(x, index, weights, int(longest[0]))

    def _padded_forward(self, x: Tensor, index: Tensor, weights: Tensor, longest: int) -> Tensor:
        experts = self.ds_etp_shard.layout.num_experts // self.ds_etp_shard.topology.ep
        expert, order = index[:, 0].sort(stable=True)
        starts = torch.searchsorted(expert, torch.arange(experts, device=x.device))
        place = torch.arange(len(x), device=x.device) - starts[expert]
        slots = torch.empty_like(expert).index_copy(0, order, expert * longest + place)
        padded = x.new_zeros(experts * longest, x.shape[1]).index_copy(0, slots, x)
        partial: Tensor = super(ShardedExperts, self).forward(padded)  # type: ignore[misc]
        return _select(partial, slots) * weights


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
