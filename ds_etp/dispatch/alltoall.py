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
from ds_etp.dispatch.base import PLAIN, DispatchOptions, DispatchOutput, TokenDispatcher, at_least_one_row
from ds_etp.dispatch.ep_first import ep_first_plan
from ds_etp.dispatch.etp_first import etp_first_plan
from ds_etp.dispatch.pairs import LocalPairs
from ds_etp.dispatch.routing_table import CountsExchange, RankLayout, RoutingCounts, RoutingPlan
from ds_etp.parallel.async_ops import run_overlapped
from ds_etp.parallel.autograd import OverlapFn
from ds_etp.parallel.collectives import unpadded
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
        return CountsExchange(self.layout, self.groups.expert_model_parallel, self.local_experts)

    def dispatch(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        options: DispatchOptions = PLAIN,
        again: DispatchOutput | None = None,
    ) -> DispatchOutput:
        """See `TokenDispatcher.dispatch`. The host has to know counts here, so there are never sentinels."""
        with torch.no_grad():
            if again is None:
                dispatched = self.dispatch_forward(x, index, weights, options)
            else:
                dispatched = self._dispatch_again(x, weights, again.handle)
        route = dispatched.route
        rows, chosen = _Dispatch.apply(dispatched, x, weights)
        return DispatchOutput(
            rows,
            dispatched.index,
            chosen,
            None,
            len(rows),
            len(x),
            route,
            by_expert=route.k_index is not None,
            counts=route.expert_counts,
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

    def dispatch_forward(
        self, x: Tensor, index: Tensor, weights: Tensor, options: DispatchOptions = PLAIN
    ) -> _Dispatched:
        """Tokens `[T, H]`, `[T, K]`, `[T, K]` to assignments `[a, H]`, `[a, k]`, `[a, k]`, and the way back."""
        layout, tokens = self.layout, len(x)
        held = layout.held_rows(tokens)
        choices = self.choices(index[held.start : held.stop])
        own = layout.owned(tokens, layout.expert_mp_rank)
        counted = index[own.start : own.stop] if options.needs_counts else None
        counts = self._counts.run(choices, tokens, counted)
        padding = None
        if self.gathers_over_etp and not layout.tp_local_ranks:
            owned = counts.owned[layout.expt_tp_ranks.start : layout.expt_tp_ranks.stop]
            padding = max(owned)
        inputs = gather_inputs(
            self.groups,
            padding,
            own,
            [x, weights, index.to(torch.int32)],  # half the bytes to send
        )
        if padding is not None:
            choices = self.choices(unpadded(inputs[2], owned))
        plan = type(self).make_plan(layout, counts, tokens, choices > 0)
        return self._assign(plan, exchange(self.groups, plan, inputs), index.dtype, options, counts.experts)

    def _dispatch_again(self, x: Tensor, weights: Tensor, route: AllToAllRoute) -> _Dispatched:
        """The same tokens by the same route."""
        inputs = gather_inputs(self.groups, route.plan.gathers_inputs, route.plan.own_rows, [x, weights])
        return self._rows(route, exchange(self.groups, route.plan, inputs))

    def _assign(
        self,
        plan: RoutingPlan,
        buffer: Sequence[Tensor],
        index_dtype: torch.dtype,
        options: DispatchOptions,
        expert_counts: tuple[int, ...] | None,
    ) -> _Dispatched:
        rows, partial_rows, k_index = plan.rows, plan.partial_rows, None
        local = buffer[2].index_select(0, rows).to(index_dtype)
        if self.makes_pairs(options):
            count = plan.num_assignments if self.groups.topology.ep > 1 else local.numel()
            pairs = LocalPairs.of(local, self.first_expert, self.local_experts, count=count)
            k_index, local = pairs.k_index, pairs.index
            rows, partial_rows = rows[pairs.row], partial_rows[pairs.row]
        route = AllToAllRoute.of(
            self.groups,
            plan,
            rows,
            partial_rows,
            index=local,
            k_index=k_index,
            num_choices=buffer[1].shape[1],
            expert_counts=expert_counts,
            reduce_dtype=self.reduce_dtype,
        )
        return self._rows(route, buffer)

    @staticmethod
    def _rows(route: AllToAllRoute, buffer: Sequence[Tensor]) -> _Dispatched:
        x, weights = buffer[0].index_select(0, route.rows), buffer[1].index_select(0, route.rows)
        if route.k_index is not None:
            weights = weights.gather(1, route.k_index[:, None])
        x, index, weights = at_least_one_row(x, route.index, weights)
        return _Dispatched(route, x, index, weights)


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
