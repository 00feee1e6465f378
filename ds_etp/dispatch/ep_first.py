"""EP first: tokens go over ep, then expt_tp peers all-gather what they received. The fewest rows.

Partial sums are reduce-scattered over expt_tp, each peer's section padded to the longest, then sent back over ep.
Legend as in `routing_table`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_etp.dispatch.routing_table import (
    MaskedRows,
    RankLayout,
    RoutingCounts,
    RoutingPlan,
    as_ints,
    expand_ranges,
    on_device,
    zero_at,
)


def ep_first_plan(layout: RankLayout, counts: RoutingCounts, tokens: int, ep_mask: Tensor) -> RoutingPlan:
    """The routing plan in which a rank sends its own tokens.

    Args:
        layout, counts: of this rank, and of this call.
        tokens: T.
        ep_mask: `[rows, ep]`, of this rank's `held_rows`.
    """
    e, j, etp, skipped = layout.ep_rank, layout.etp_rank, layout.etp, layout.tp_local_ep_ranks
    itself = range(e, e + 1)
    own, held = layout.owned(tokens, layout.expert_mp_rank), layout.held_rows(tokens)
    needed_here = counts.rows[:, :, e]  # [ep, etp], by owner
    needed_of_own = counts.rows[e, j]
    remote = zero_at(needed_here, skipped)
    recv_padding = int(remote.sum(0).max()) if etp > 1 else 0
    section = int(needed_here.sum(0).max())

    # Sections of partial rows by etp_rank of the owner; in each, owners by ep_rank, this ep_rank's own last.
    others = zero_at(needed_here, itself)
    partial_start = others.cumsum(0) - others
    partial_start[e] = others.sum(0)
    partial_start += torch.arange(etp) * section

    # Received rows by etp_rank of the peer that received them, each peer's padded to the longest.
    recv_start = remote.cumsum(0) - remote + torch.arange(etp) * recv_padding
    local = layout.tp_local_ranks
    local_partial, remote_rows, remote_partial = on_device(
        [
            expand_ranges(
                partial_start.flatten()[local.start : local.stop], needed_here.flatten()[local.start : local.stop]
            ),
            expand_ranges(recv_start.t().flatten() + tokens, remote.t().flatten()),
            expand_ranges(partial_start.t().flatten(), remote.t().flatten()),
        ],
        ep_mask.device,
    )
    own_by_ep = MaskedRows.of(ep_mask[own.start - held.start : own.stop - held.start], needed_of_own)
    back = zero_at(needed_here[:, j], itself)
    staying = own_by_ep.at(e)
    if etp == 1 and local:  # nobody else adds to the sums of this rank's own rows: they are made where they stay
        start = int(needed_here.flatten()[local.start : layout.expert_mp_rank].sum())
        local_partial[start : start + len(staying)] = staying + int(back.sum())
    num_local = int(needed_here.flatten()[local.start : local.stop].sum())
    local_rows = torch.nonzero_static(ep_mask[:, e], size=num_local)[:, 0] + held.start
    return RoutingPlan(
        tokens=tokens,
        gathers_inputs=None,
        own_rows=own,
        sends=not layout.all_tp_local,
        send_rows=own_by_ep.without(skipped) + own.start,
        input_splits=as_ints(zero_at(needed_of_own, skipped)),
        output_splits=as_ints(remote[:, j]),
        received=etp * recv_padding if etp > 1 else int(remote[:, j].sum()),
        recv_padding=recv_padding if etp > 1 else None,
        rows=torch.cat([local_rows, remote_rows]),
        num_assignments=counts.assignments[e],
        partial_rows=torch.cat([local_partial, remote_partial]),
        num_partial_rows=section * etp if etp > 1 else int(back.sum()) + len(own),
        reduce_padding=section if etp > 1 else None,
        combine_input_splits=as_ints(back),
        combine_output_splits=as_ints(zero_at(needed_of_own, itself)),
        num_own_rows=len(own),
        staying_rows=staying if etp > 1 else None,
        returned_rows=own_by_ep.without(itself),
        reduce_splits=None,
    )
