"""Plans: how tokens reach experts, and how the experts' partial outputs come back merged.

Legend: T tokens in this rank's batch, t tokens it owns (tensor-parallel peers hold the same batch and own
a share each), n rows this rank's experts work on, a (row, local expert) assignments, H hidden size,
K experts per token, E experts, e experts on this rank.

Every plan sees to it that a token is worked on once per expert shard in the whole world, and that a rank's
experts get rows with indices over its own experts. The module's forward is

    rows = plan.dispatch(x, index, weights)
    y = plan.combine(family_forward(rows.x, rows.index, rows.weights), rows)

A plan is a class with these two methods; `PLANS` names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_etp import collectives as c
from ds_etp.groups import ExpertGroups
from ds_etp.rows import all_gather_single, block_sizes, even_sizes


@dataclass
class Rows:
    """What one rank's experts work on, and what its plan needs to bring the results back.

    Attributes:
        x: `[a, H]`.
        index: `[a, k]`, over this rank's experts.
        weights: `[a, k]`.
        owner: `[a]`, which of the n rows an assignment belongs to; None where rows are assignments.
        count: n, how many rows arrived.
        tokens: T, how many tokens the module was called with.
        route: the plan's own notes.
    """

    x: Tensor
    index: Tensor
    weights: Tensor
    owner: Tensor | None
    count: int
    tokens: int
    route: Any = None


class Plan(Protocol):
    """How tokens reach experts in one topology."""

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor) -> Rows:
        """From this rank's tokens `[T, H]`, `[T, K]`, `[T, K]` to the rows its experts work on."""

    def combine(self, partial: Tensor, rows: Rows) -> Tensor:
        """From this rank's partial outputs `[a, H]` to the outputs of its own tokens `[T, H]`."""


class _Base:
    """What plans share: which experts are local, and rows in and out of the family's forward."""

    def __init__(self, groups: ExpertGroups, num_experts: int, reduce_dtype: torch.dtype | None) -> None:
        self.groups = groups
        self.reduce_dtype = reduce_dtype
        self.local_experts = num_experts // groups.topology.ep
        self.first_expert = groups.ep.index * self.local_experts

    def __deepcopy__(self, memo: dict[int, Any]) -> _Base:
        # Process groups can't be copied; a copied module (an EMA, say) talks to the same peers.
        return self

    def _to_local(self, x: Tensor, index: Tensor, weights: Tensor, tokens: int, route: Any = None) -> Rows:
        """Rows whose assignments are all to local experts, and at least one of them."""
        count, owner = len(x), None
        if self.groups.topology.ep > 1:
            local = index - self.first_expert
            # One row for each (token, local expert) pair: families don't agree on an index for "not here".
            owner, choice = ((local >= 0) & (local < self.local_experts)).nonzero(as_tuple=True)
            x, index, weights = x[owner], local[owner, choice, None], weights[owner, choice, None]
        if len(x) == 0:
            # A family's forward may lose its graph without rows, and peers would wait for its backward.
            # A row of zeros with weight zero keeps the graph and adds exactly nothing.
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
            index = torch.cat([index, index.new_zeros(1, index.shape[1])])
            weights = torch.cat([weights, weights.new_zeros(1, weights.shape[1])])
            if owner is None:
                owner = index.new_zeros(0)
        return Rows(x, index, weights, owner, count, tokens, route)

    @staticmethod
    def _from_local(partial: Tensor, rows: Rows) -> Tensor:
        """Partial outputs `[a, H]` summed by row: `[n, H]`."""
        if rows.owner is None:
            return partial
        out = partial.new_zeros(rows.count, partial.shape[1])
        return out.index_add(0, rows.owner, partial[: len(rows.owner)])


class Replicated(_Base):
    """For tokens that every rank of an expert-model-parallel block holds already: nothing goes out.

    Needs `tp` to be a multiple of `ep * etp`. Where a tensor-parallel group holds several blocks, each takes
    its share of the tokens, and the results are gathered over the tensor-parallel group.
    """

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor) -> Rows:
        """See `Plan.dispatch`. Forward: no message."""
        tp, block, tokens = self.groups.tp, self.groups.expert_model_parallel, len(x)
        if tp.size == block.size:
            x, weights = c.copy(block, x, weights, reduce_dtype=self.reduce_dtype)
        else:
            x, index, weights = c.share(tp, block, x, index, weights, reduce_dtype=self.reduce_dtype)
        return self._to_local(x, index, weights, tokens)

    def combine(self, partial: Tensor, rows: Rows) -> Tensor:
        """See `Plan.combine`. Forward: an all-reduce, or a reduce-scatter and an all-gather over tp."""
        tp, block = self.groups.tp, self.groups.expert_model_parallel
        partial = self._from_local(partial, rows)
        if tp.size == block.size:
            return c.all_reduce(block, partial, reduce_dtype=self.reduce_dtype)
        sizes = block_sizes(tp, block, even_sizes(rows.tokens, tp.size))
        own = c.reduce_scatter(block, sizes, partial, reduce_dtype=self.reduce_dtype)
        return c.unsplit(tp, rows.tokens, own)


@dataclass
class _Route:
    """How an all-to-all dispatch sent its rows: what `combine` undoes."""

    owned: int
    sent_tokens: Tensor | None
    send: Sequence[int]
    receive: Sequence[int]
    union: Sequence[int]


class AllToAll(_Base):
    """For every topology: a token goes once to each rank of the `ep` group that has an expert for it.

    The receivers share what they got with their `expt_tp` peers, which hold the other slices of the same
    experts; partial outputs are merged there, and go back the way they came.
    """

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor) -> Rows:
        """See `Plan.dispatch`. Forward: sizes, an all-to-all over ep, an all-gather over expt_tp."""
        groups, tokens = self.groups, len(x)
        x, index, weights = c.split(groups.tp, x, index, weights)
        owned, sent_tokens = len(x), None
        index_dtype, index = index.dtype, index.to(torch.int32)  # half the bytes on the wire
        if groups.ep.size > 1:
            wanted = index.new_zeros(owned, groups.ep.size, dtype=torch.bool)
            wanted.scatter_(1, (index // self.local_experts).long(), True)
            sent_tokens = wanted.t().nonzero()[:, 1]
            send, receive, union = self._exchange_sizes(wanted.sum(0))
            x, index, weights = (tensor[sent_tokens] for tensor in (x, index, weights))
            x, index, weights = c.all_to_all(groups.ep, send, receive, x, index, weights)
        else:
            send, receive, union = self._exchange_sizes(torch.full((1,), owned, device=x.device))
        x, index, weights = c.gather(groups.expt_tp, union, x, index, weights, reduce_dtype=self.reduce_dtype)
        route = _Route(owned, sent_tokens, send, receive, union)
        return self._to_local(x, index.to(index_dtype), weights, tokens, route)

    def combine(self, partial: Tensor, rows: Rows) -> Tensor:
        """See `Plan.combine`. Forward: a reduce-scatter over expt_tp, an all-to-all, a gather over tp."""
        groups, route = self.groups, rows.route
        y = self._from_local(partial, rows)
        y = c.reduce_scatter(groups.expt_tp, route.union, y, reduce_dtype=self.reduce_dtype)
        if route.sent_tokens is not None:
            (y,) = c.all_to_all(groups.ep, route.receive, route.send, y)
            y = y.new_zeros(route.owned, y.shape[1]).index_add(0, route.sent_tokens, y)
        return c.unsplit(groups.tp, rows.tokens, y)

    def _exchange_sizes(self, send_counts: Tensor) -> tuple[list[int], list[int], list[int]]:
        """Rows to send to and receive from each ep peer, and how many each expt_tp peer received.

        One message tells all of it: every rank of the block learns what every other one sends where.
        """
        groups = self.groups
        block, (ep, etp) = groups.expert_model_parallel, (groups.ep, groups.expt_tp)
        counts = send_counts.to(torch.int64)
        if block.size > 1:
            gathered = counts.new_empty(block.size * ep.size)
            all_gather_single(gathered, counts, group=block.group)
            counts = gathered
        # Neighbours of a block differ in etp first: [ep sender, etp, ep receiver].
        table = counts.view(ep.size, etp.size, ep.size).tolist()
        send = table[ep.index][etp.index]
        receive = [table[sender][etp.index][ep.index] for sender in range(ep.size)]
        union = [sum(table[sender][peer][ep.index] for sender in range(ep.size)) for peer in range(etp.size)]
        return send, receive, union


PLANS: dict[str, type[Replicated | AllToAll]] = {"replicated": Replicated, "alltoall": AllToAll}
