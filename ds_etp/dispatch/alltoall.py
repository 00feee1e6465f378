"""All-to-all dispatch: a token goes only to ranks that have an expert for it, and once to each.

Each call exchanges token counts, makes a `RoutingPlan` of them (EP first or ETP first, a pure function), and runs it.

Legend: T tokens in this rank's batch, a (row, local expert) assignments, H hidden size, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.dispatch.alltoall_route import AllToAllRoute, OverlappedCombine, exchange, gather_inputs
from ds_etp.dispatch.base import DispatchOutput, TokenDispatcher, local_pairs
from ds_etp.dispatch.ep_first import ep_first_plan
from ds_etp.dispatch.etp_first import etp_first_plan
from ds_etp.dispatch.routing_table import CountsExchange, RankLayout, RoutingCounts, RoutingPlan
from ds_etp.parallel.async_ops import run_overlapped
from ds_etp.parallel.autograd import OverlapFn
from ds_etp.parallel.collectives import (
    unpadded,
)
from ds_etp.parallel.topology import GroupKind

MakePlan = Callable[[RankLayout, RoutingCounts, int, Tensor], RoutingPlan]


@dataclass
class _Dispatched:
    """What forward's messages brought, on its way into the graph."""

    route: AllToAllRoute
    x: Tensor
    index: Tensor
    weights: Tensor


class _Dispatch(Function):
    """Hands out what was dispatched; backward brings gradients `[a, H]` and `[a, 1]` back to the tokens."""

    @staticmethod
    def forward(ctx: Any, dispatched: _Dispatched, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.route = dispatched.route
        return dispatched.x, dispatched.weights

    @staticmethod
    def backward(ctx: Any, x: Tensor, weights: Tensor) -> tuple[Any, ...]:
        return None, *ctx.route.combine(x, weights)


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, route: AllToAllRoute, partial: Tensor) -> Tensor:
        ctx.route = route
        return route.combine(partial)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.route.dispatch(grad)


class AllToAll(TokenDispatcher):
    """For every topology. Token counts of all expert ranks are exchanged once per call; the host waits for them."""

    private_groups: ClassVar[frozenset[GroupKind]] = frozenset({"expt_tp", "ep"})
    make_plan: MakePlan
    gathers_over_etp: bool

    @cached_property
    def layout(self) -> RankLayout:
        """This rank's place, worked out once."""
        return RankLayout.of(self.groups)

    @cached_property
    def _counts(self) -> CountsExchange:
        return CountsExchange(self.layout, self.groups.expert_model_parallel)

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, *, with_sentinels: bool = False) -> DispatchOutput:
        """See `TokenDispatcher.dispatch`. The host has to know counts here, so there are never sentinels."""
        with torch.no_grad():
            dispatched = self.dispatch_forward(x, index, weights)
        rows, chosen = _Dispatch.apply(dispatched, x, weights)
        by_expert = self.groups.topology.ep > 1
        return DispatchOutput(
            rows, dispatched.index, chosen, None, None, len(rows), len(x), dispatched.route, by_expert=by_expert
        )

    def combine(self, partial: Tensor, rows: DispatchOutput, overlap_fn: OverlapFn = None) -> Tensor:
        """See `TokenDispatcher.combine`."""
        if overlap_fn is not None:
            return run_overlapped(OverlappedCombine(rows.handle), partial, overlap_fn)
        result: Tensor = _Combine.apply(rows.handle, partial)
        return result

    def rows_sent(self, rows: DispatchOutput) -> int:
        """See `TokenDispatcher.rows_sent`."""
        route: AllToAllRoute = rows.handle
        return route.rows_sent()

    def choices(self, index: Tensor) -> Tensor:
        """How many experts on each ep_rank each row of `[n, K]` has: `[n, ep]`."""
        ep_ranks = torch.arange(self.groups.ep.size, device=index.device)
        return ((index // self.local_experts)[:, None] == ep_ranks[:, None]).sum(2)

    def dispatch_forward(self, x: Tensor, index: Tensor, weights: Tensor) -> _Dispatched:
        """Tokens `[T, H]`, `[T, K]`, `[T, K]` to assignments `[a, H]`, `[a, k]`, `[a, k]`, and the way back."""
        layout, tokens = self.layout, len(x)
        held = layout.held_rows(tokens)
        choices = self.choices(index[held.start : held.stop])
        counts = self._counts.run(choices, tokens)
        padding = None
        if self.gathers_over_etp and not layout.tp_local_ranks:
            owned = counts.owned[layout.expt_tp_ranks.start : layout.expt_tp_ranks.stop]
            padding = max(owned)
        inputs = gather_inputs(
            self.groups,
            padding,
            layout.owned(tokens, layout.expert_mp_rank),
            [x, weights, index.to(torch.int32)],  # half the bytes to send
        )
        if padding is not None:
            choices = self.choices(unpadded(inputs[2], owned))
        plan = type(self).make_plan(layout, counts, tokens, choices > 0)
        return self._assign(plan, exchange(self.groups, plan, inputs), index.dtype)

    def _assign(self, plan: RoutingPlan, buffer: Sequence[Tensor], index_dtype: torch.dtype) -> _Dispatched:
        rows, partial_rows, k_index = plan.rows, plan.partial_rows, None
        local = buffer[2].index_select(0, rows)
        if self.groups.topology.ep > 1:
            row, k_index, local = local_pairs(local, self.first_expert, self.local_experts, plan.num_assignments)
            rows, partial_rows = rows[row], partial_rows[row]
        route = AllToAllRoute.of(self.groups, plan, rows, partial_rows, k_index, buffer[1].shape[1], self.reduce_dtype)
        weights = route.permute(buffer[1])
        if len(local) == 0:
            local, weights = local.new_zeros(1, 1), weights[:, :1]
        elif k_index is not None:
            weights = weights.gather(1, k_index[:, None])
        return _Dispatched(route, route.permute(buffer[0]), local.to(index_dtype), weights)


class EPFirst(AllToAll):
    """Counts, an all-to-all over ep, an all-gather over expt_tp, and their transposes back.

    Where tensor-parallel peers hold all tokens already nothing goes out, and only the way back remains.
    """

    make_plan = staticmethod(ep_first_plan)
    gathers_over_etp = False


class ETPFirst(AllToAll):
    """Counts, an all-gather over expt_tp unless its peers hold the same tokens, an all-to-all over ep, and back."""

    make_plan = staticmethod(etp_first_plan)
    gathers_over_etp = True
