"""The way of one all-to-all call out to the experts and back, by its routing plan. Nothing here decides where rows go.

Input rows are this rank's batch (EP first) or that of its expt_tp group (ETP first). Out: gather inputs -> all-to-all
over ep -> all-gather over expt_tp -> permute. Back, the transpose: unpermute -> reduce-scatter over expt_tp ->
all-to-all over ep -> all-gather over tp.

Legend: T tokens in this rank's batch, a (row, local expert) assignments, H hidden size, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_etp.dispatch.recv_buffer import RecvBuffer, select_rows
from ds_etp.dispatch.routing_table import RoutingPlan
from ds_etp.dispatch.segments import Segments
from ds_etp.parallel.async_ops import AsyncWork, OverlappedOp, completed, start_all_to_all
from ds_etp.parallel.collectives import (
    all_gather_padded,
    all_gather_rows,
    all_to_all_rows,
    balanced_splits,
    pack_columns,
    reduce_scatter_padded,
    reduce_scatter_rows,
    unpack_views,
)
from ds_etp.parallel.process_groups import ExpertGroups


@dataclass(frozen=True)
class AllToAllRoute:
    """One call's way out to the experts and back: the plan, and the assignments that were made of its rows.

    Attributes:
        groups: the process groups.
        plan: of this call.
        rows: `[a]`, the buffer row of each assignment.
        partial_rows: `[a]`, the partial row it is summed into.
        by_partial_row: the assignments of each partial row.
        by_own_row: of each own row, its sum that stayed and those that came back, one behind the other.
        index: `[a, k]`, over this rank's experts.
        k_index: `[a]`, which of its token's K experts it is; None where a row is one assignment.
        num_choices: K.
        expert_counts: assignments of each local expert, where they were asked for.
        reduce_dtype: what partial sums are added up in; None for their own dtype.
    """

    groups: ExpertGroups
    plan: RoutingPlan
    rows: Tensor
    partial_rows: Tensor
    by_partial_row: Segments
    by_own_row: Segments | None
    index: Tensor
    k_index: Tensor | None
    num_choices: int
    expert_counts: tuple[int, ...] | None
    reduce_dtype: torch.dtype | None

    @classmethod
    def of(
        cls,
        groups: ExpertGroups,
        plan: RoutingPlan,
        rows: Tensor,
        partial_rows: Tensor,
        *,
        index: Tensor,
        k_index: Tensor | None,
        num_choices: int,
        expert_counts: tuple[int, ...] | None,
        reduce_dtype: torch.dtype | None,
    ) -> AllToAllRoute:
        """From the plan and the assignments."""
        by_partial_row, by_own_row = Segments.of(partial_rows, plan.num_partial_rows), None
        if groups.topology.ep > 1:
            staying = plan.staying_rows
            if staying is None:
                staying = torch.arange(plan.num_own_rows, device=rows.device)
            by_own_row = Segments.of(torch.cat([staying, plan.returned_rows]), plan.num_own_rows)
        return cls(
            groups,
            plan,
            rows,
            partial_rows,
            by_partial_row,
            by_own_row,
            index,
            k_index,
            num_choices,
            expert_counts,
            reduce_dtype,
        )

    def dispatch(self, tensor: Tensor) -> Tensor:
        """Tokens `[T, H]`, alike on tensor-parallel peers, to one row per assignment `[a, H]`."""
        inputs = gather_inputs(self.groups, self.plan.gathers_inputs, self.plan.own_rows, [tensor])
        return self.permute(exchange(self.groups, self.plan, inputs)[0])

    def permute(self, buffer: Tensor) -> Tensor:
        """One row per assignment. A row of zeros where there is none.

        A family's forward may lose its graph without rows, and peers would wait for its backward; a row of
        zeros with weight zero keeps the graph and adds exactly nothing.
        """
        if len(self.rows) == 0:
            return buffer.new_zeros(1, buffer.shape[1])
        return buffer.index_select(0, self.rows)

    def combine(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The sum over assignments `[a, H]`, by token: `[T, H]`. A second tensor holds weights: `[T, K]`."""
        back, own = self.reduce(tensors)
        if self.groups.topology.ep > 1:
            splits = self.plan.combine_input_splits, self.plan.combine_output_splits
            back = all_to_all_rows(back, *splits, self.groups.ep)
        return self.finish(own, back, [tensor.dtype for tensor in tensors])

    def reduce(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Sums of `combine`'s tensors by row: those that go back over ep, and those of own rows."""
        plan, groups = self.plan, self.groups
        sums = [self._unpermute(tensor, is_weights=number > 0) for number, tensor in enumerate(tensors)]
        if plan.reduce_padding is not None:
            sums = list(reduce_scatter_padded(sums, plan.reduce_padding, groups.expt_tp))
        if groups.topology.ep == 1:
            # Without padding, and no views: a function of autograd should return none.
            rows = plan.num_own_rows
            return [], [total if len(total) == rows else total[:rows].clone() for total in sums]
        sent = sum(plan.combine_input_splits)
        stay = sent + (plan.num_own_rows if plan.staying_rows is None else len(plan.staying_rows))
        return [total[:sent] for total in sums], [total[sent:stay] for total in sums]

    def finish(
        self, own: Sequence[Tensor], back: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> tuple[Tensor, ...]:
        """From sums of own rows, and those that came back over ep, to tokens `[T, ...]`."""
        plan, groups = self.plan, self.groups
        if self.by_own_row is not None:
            own = [self.by_own_row.sum(torch.cat(parts)) for parts in zip(own, back, strict=True)]
        if plan.reduce_splits is not None:
            own = reduce_scatter_rows(own, plan.reduce_splits, groups.expt_tp, None)
        result = [total.to(dtype) for total, dtype in zip(own, dtypes, strict=True)]
        return all_gather_rows(result, balanced_splits(plan.tokens, groups.tp.size), groups.tp)

    def rows_sent(self) -> int:
        """Rows this rank sends to others, out and back, padding included; without the gather over tp."""
        plan, ep, expt_tp = self.plan, self.groups.ep, self.groups.expt_tp
        over_ep = sum(plan.input_splits) - plan.input_splits[ep.index] + sum(plan.combine_input_splits)
        padded = (plan.gathers_inputs, plan.recv_padding, plan.reduce_padding, max(plan.reduce_splits or (0,)))
        return over_ep + (expt_tp.size - 1) * sum(length or 0 for length in padded)

    def _unpermute(self, tensor: Tensor, *, is_weights: bool) -> Tensor:
        """Assignments `[a, ...]` added up by partial row: `[num_partial_rows, ...]`."""
        dtype = self.reduce_dtype or tensor.dtype
        if not is_weights:
            return self.by_partial_row.sum(tensor, dtype)
        total = tensor.new_zeros(self.plan.num_partial_rows, self.num_choices, dtype=dtype)
        tensor = tensor[: len(self.partial_rows)].to(dtype)
        if self.k_index is None:
            total[self.partial_rows] = tensor
        else:
            total[self.partial_rows, self.k_index] = tensor[:, 0]  # no pair occurs twice
        return total


def gather_inputs(
    groups: ExpertGroups, padding: int | None, own_rows: range, tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The input rows: this rank's batch, or the own rows of its expt_tp group, each rank's padded to `padding`."""
    if padding is None:
        return tensors
    message = pack_columns([tensor[own_rows.start : own_rows.stop] for tensor in tensors])
    return unpack_views(all_gather_padded(message, padding, groups.expt_tp), tensors)


def exchange(groups: ExpertGroups, plan: RoutingPlan, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The buffer's tensors: rows of the inputs that experts here work on, and behind them those that arrive.

    Where no rank sends anything the inputs themselves are the buffer.
    """
    if plan.local_rows is None:
        return inputs
    buffer = RecvBuffer(inputs, plan.local_rows, plan.received)
    out = buffer.recv if plan.recv_padding is None else None
    message = select_rows(inputs, plan.send_rows)
    (message,) = all_to_all_rows([message], plan.input_splits, plan.output_splits, groups.ep, out=out)
    return _received(groups, plan, buffer, message)


def _received(groups: ExpertGroups, plan: RoutingPlan, buffer: RecvBuffer, message: Tensor) -> Sequence[Tensor]:
    """The buffer's tensors, once what came over ep is in it: this rank's part, or that of its expt_tp group."""
    if plan.recv_padding is not None:
        all_gather_padded(message, plan.recv_padding, groups.expt_tp, out=buffer.recv)
    elif message is not buffer.recv:
        buffer.recv.copy_(message)
    return buffer.tensors()


class OverlappedCombine(OverlappedOp):
    """`AllToAllRoute.combine` of one tensor: the message that overlaps is the all-to-all, which may leave a node."""

    def __init__(self, route: AllToAllRoute) -> None:
        self.route = route
        self.dtype = torch.float32
        self.own: Sequence[Tensor] = ()
        self.inputs: Sequence[Tensor] = ()
        self.buffer: RecvBuffer | None = None

    def start(self, tensor: Tensor) -> AsyncWork:
        route, plan = self.route, self.route.plan
        self.dtype = tensor.dtype
        back, self.own = route.reduce([tensor])
        if route.groups.topology.ep == 1:
            return completed(tensor[:0])
        return start_all_to_all(back[0], plan.combine_input_splits, plan.combine_output_splits, route.groups.ep)

    def finish(self, tensor: Tensor) -> Tensor:
        own, self.own = self.own, ()
        return self.route.finish(own, [tensor], [self.dtype])[0]

    def start_backward(self, grad: Tensor) -> AsyncWork:
        groups, plan = self.route.groups, self.route.plan
        self.inputs = gather_inputs(groups, plan.gathers_inputs, plan.own_rows, [grad])
        if plan.local_rows is None:
            return completed(grad[:0])
        self.buffer = RecvBuffer(self.inputs, plan.local_rows, plan.received)
        message = select_rows(self.inputs, plan.send_rows)
        if groups.topology.ep == 1:
            return completed(message)
        return start_all_to_all(message, plan.input_splits, plan.output_splits, groups.ep)

    def finish_backward(self, tensor: Tensor) -> Tensor:
        inputs, buffer, self.inputs, self.buffer = self.inputs, self.buffer, (), None
        if buffer is not None:
            inputs = _received(self.route.groups, self.route.plan, buffer, tensor)
        return self.route.permute(inputs[0])
