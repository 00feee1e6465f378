"""ETP first: expt_tp peers share their tokens before they go over ep. Fewer messages where they hold the same tokens.

A rank sends the tokens of its whole expt_tp group; sums come back over ep and are reduce-scattered over expt_tp last.
Messages over expt_tp have the batches' own shapes. Legend as in `routing_table`.
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


def etp_first_plan(layout: RankLayout, counts: RoutingCounts, tokens: int, ep_mask: Tensor) -> RoutingPlan:
    """The routing plan in which a rank sends the tokens of its expt_tp group.

    Args:
        layout, counts: of this rank, and of this call.
        tokens: T.
        ep_mask: `[rows, ep]`, of this rank's `held_rows` where it has TP-local ranks; else of the rows that its
            expt_tp group has gathered, padding left out.
    """
    e, etp, local = layout.ep_rank, layout.etp, layout.tp_local_ranks
    itself, peers = range(e, e + 1), layout.expt_tp_ranks
    owned = counts.owned[peers.start : peers.stop]
    held = layout.held_rows(tokens)
    skipped = layout.tp_local_ep_ranks if local else itself
    by_group = counts.rows.sum(1)  # [ep, ep]: needed at each ep_rank, of the tokens of each expt_tp group
    needed_here, needed_of_group = by_group[:, e], by_group[e]
    back = zero_at(needed_here, itself)
    sent_back = int(back.sum())

    # Partial rows: those of other groups' tokens by owner, then one for each token of this group.
    by_owner = counts.rows[:, :, e]
    others = zero_at(by_owner, itself).flatten()
    partial_start = others.cumsum(0) - others
    local_owners = local or peers
    output_splits = zero_at(needed_here, skipped)
    padding = max(owned)
    tables = [
        expand_ranges(
            partial_start[local_owners.start : local_owners.stop],
            by_owner.flatten()[local_owners.start : local_owners.stop],
        ),
        expand_ranges(partial_start[::etp], output_splits),
    ]
    if not local:
        tables.append(expand_ranges(torch.arange(etp) * padding, torch.tensor(owned)))
    local_partial, remote_partial, *gathered = on_device(tables, ep_mask.device)

    # Candidates to send: rows of the mask, and where they are in the buffer.
    if local:
        start = layout.owned(tokens, peers.start).start - held.start
        candidates, num_inputs = ep_mask[start : start + sum(owned)], tokens
    else:
        start, candidates, num_inputs = 0, ep_mask, padding * etp
    group_by_ep = MaskedRows.of(candidates, needed_of_group)
    staying = group_by_ep.at(e)
    first = int(by_owner.flatten()[local_owners.start : peers.start].sum())
    local_partial[first : first + len(staying)] = staying + sent_back  # parts of peers are added once they are back
    local_rows = torch.nonzero_static(ep_mask[:, e], size=len(local_partial))[:, 0]
    send_rows = group_by_ep.without(skipped) + start
    if gathered:
        local_rows, send_rows = gathered[0][local_rows], gathered[0][send_rows]
    else:
        local_rows, send_rows = local_rows + held.start, send_rows + held.start
    received = int(output_splits.sum())
    remote_rows = torch.arange(num_inputs, num_inputs + received, device=ep_mask.device)
    return RoutingPlan(
        tokens=tokens,
        gathers_inputs=None if local else padding,
        own_rows=layout.owned(tokens, layout.expert_mp_rank),
        sends=not layout.all_tp_local,
        send_rows=send_rows,
        input_splits=as_ints(zero_at(needed_of_group, skipped)),
        output_splits=as_ints(output_splits),
        received=received,
        recv_padding=None,
        rows=torch.cat([local_rows, remote_rows]),
        num_assignments=counts.assignments[e],
        partial_rows=torch.cat([local_partial, remote_partial]),
        num_partial_rows=sent_back + sum(owned),
        reduce_padding=None,
        combine_input_splits=as_ints(back),
        combine_output_splits=as_ints(zero_at(needed_of_group, itself)),
        num_own_rows=sum(owned),
        staying_rows=None,
        returned_rows=group_by_ep.without(itself),
        reduce_splits=owned,
    )
