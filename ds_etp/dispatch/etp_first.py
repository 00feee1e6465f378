"""ETP first: expt_tp peers share their tokens before they go over ep. Fewer messages where they hold the same tokens.

A rank sends the tokens of its whole expt_tp group; sums come back over ep and are reduce-scattered over expt_tp last.
Messages over expt_tp have the batches' own shapes. Legend as in `routing_table`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds_etp.dispatch.masked_rows import MaskedRows, as_ints, starts_of, zero_at
from ds_etp.dispatch.routing_table import RankLayout, RoutingCounts, RoutingPlan
from ds_etp.parallel.host import expand_ranges


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
    by_owner = counts.rows[:, :, e]
    # Of the tokens of each expt_tp group those needed here, and of this group's those needed at each ep_rank.
    needed_here, needed_of_group = by_owner.sum(1), counts.rows[e].sum(0)
    back = zero_at(needed_here, itself)
    num_back, num_own = int(back.sum()), sum(owned)

    # Partial rows: those of other groups' tokens by owner, then one for each token of this group.
    partial_start = starts_of(zero_at(by_owner, itself).ravel())
    local_owners = local or peers
    output_splits = zero_at(needed_here, skipped)
    needed_locally = by_owner.ravel()[local_owners.start : local_owners.stop]
    num_local, received, padding = int(needed_locally.sum()), int(output_splits.sum()), max(owned)
    lists = [
        (
            np.concatenate([partial_start[local_owners.start : local_owners.stop], partial_start[::etp]]),
            np.concatenate([needed_locally, output_splits]),
        )
    ]
    if not local:
        lists.append((np.arange(etp) * padding, np.array(owned)))
    partial_rows, *gathered = expand_ranges(ep_mask.device, *lists)

    # Candidates to send: rows of the mask, and where they are in the inputs.
    if local:
        start = layout.owned(tokens, peers.start).start - held.start
        candidates = ep_mask[start : start + num_own]
    else:
        start, candidates = 0, ep_mask
    group_by_ep = MaskedRows.of(candidates, needed_of_group)
    staying = group_by_ep.at(e)
    first = int(by_owner.ravel()[local_owners.start : peers.start].sum())
    partial_rows[first : first + len(staying)] = staying + num_back  # parts of peers are added once they are back
    local_rows = torch.nonzero_static(ep_mask[:, e], size=num_local)[:, 0]
    send_rows = group_by_ep.without(skipped) + start
    if gathered:
        local_rows, send_rows = gathered[0][local_rows], gathered[0][send_rows]
    else:
        local_rows, send_rows = local_rows + held.start, send_rows + held.start
    sends = not layout.all_tp_local
    return RoutingPlan(
        tokens=tokens,
        gathers_inputs=None if local else padding,
        own_rows=layout.owned(tokens, layout.expert_mp_rank),
        local_rows=local_rows if sends else None,
        send_rows=send_rows,
        input_splits=as_ints(zero_at(needed_of_group, skipped)),
        output_splits=as_ints(output_splits),
        received=received,
        recv_padding=None,
        rows=torch.arange(num_local + received, device=ep_mask.device) if sends else local_rows,
        num_assignments=counts.num_assignments,
        partial_rows=partial_rows,
        num_partial_rows=num_back + num_own,
        reduce_padding=None,
        combine_input_splits=as_ints(back),
        combine_output_splits=as_ints(zero_at(needed_of_group, itself)),
        num_own_rows=num_own,
        staying_rows=None,
        returned_rows=group_by_ep.without(itself),
        reduce_splits=owned,
    )
