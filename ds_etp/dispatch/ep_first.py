"""EP first: tokens go over ep, then expt_tp peers all-gather what they received. The fewest rows.

Partial sums are reduce-scattered over expt_tp, each peer's section padded to the longest, then sent back over ep.
Legend as in `routing_table`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds_etp.dispatch.masked_rows import MaskedRows, as_ints, starts_of, zero_at
from ds_etp.dispatch.routing_table import RankLayout, RoutingCounts, RoutingPlan
from ds_etp.parallel.host import expand_ranges


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
    partial_start = starts_of(others)
    partial_start[e] = others.sum(0)
    partial_start += np.arange(etp) * section

    # Received rows by etp_rank of the peer that received them, each peer's padded to the longest, behind local ones.
    local, sends = layout.tp_local_ranks, not layout.all_tp_local
    needed_locally = needed_here.ravel()[local.start : local.stop]
    num_local = int(needed_locally.sum())
    recv_start = starts_of(remote) + np.arange(etp) * recv_padding + num_local
    by_peer = remote.T.ravel()
    rows, partial_rows = expand_ranges(
        ep_mask.device,
        (np.concatenate([[0], recv_start.T.ravel()]), np.concatenate([[num_local], by_peer])),
        (
            np.concatenate([partial_start.ravel()[local.start : local.stop], partial_start.T.ravel()]),
            np.concatenate([needed_locally, by_peer]),
        ),
    )
    own_by_ep = MaskedRows.of(ep_mask[own.start - held.start : own.stop - held.start], needed_of_own)
    back = zero_at(needed_here[:, j], itself)
    staying, num_back = own_by_ep.at(e), int(back.sum())
    if etp == 1 and local:  # nobody else adds to the sums of this rank's own rows: they are made where they stay
        start = int(needed_here.ravel()[local.start : layout.expert_mp_rank].sum())
        partial_rows[start : start + len(staying)] = staying + num_back
    local_rows = torch.nonzero_static(ep_mask[:, e], size=num_local)[:, 0] + held.start
    received = remote[:, j]
    return RoutingPlan(
        tokens=tokens,
        gathers_inputs=None,
        own_rows=own,
        local_rows=local_rows if sends else None,
        send_rows=own_by_ep.without(skipped) + own.start,
        input_splits=as_ints(zero_at(needed_of_own, skipped)),
        output_splits=as_ints(received),
        received=etp * recv_padding if etp > 1 else int(received.sum()),
        recv_padding=recv_padding if etp > 1 else None,
        rows=rows if sends else local_rows,
        num_assignments=counts.num_assignments,
        partial_rows=partial_rows,
        num_partial_rows=section * etp if etp > 1 else num_back + len(own),
        reduce_padding=section if etp > 1 else None,
        combine_input_splits=as_ints(back),
        combine_output_splits=as_ints(zero_at(needed_of_own, itself)),
        num_own_rows=len(own),
        staying_rows=staying if etp > 1 else None,
        returned_rows=own_by_ep.without(itself),
        reduce_splits=None,
    )
