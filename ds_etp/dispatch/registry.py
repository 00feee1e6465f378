"""Dispatchers: how tokens reach experts, and how the experts' partial outputs come back merged.

Every dispatcher sees to it that a token is worked on once per expert shard in the whole world, and that a rank's
experts get rows with indices over its own experts. The module's forward is

    rows = dispatcher.dispatch(x, index, weights)
    y = dispatcher.combine(family_forward(rows.x, rows.index, rows.weights), rows)

`DISPATCHERS` names them, as the config block and `cost` do.

What dispatch keeps for backward is, per MoE layer, the rows this rank's experts work on, `[a, H]`, where the
family's forward keeps them, and index tensors of a few numbers per row. `a` is at most the tokens of the
ep * etp expert ranks times the local experts a token can have, min(K, E / ep); with uniform routing it is
K / ep for each of those tokens, and where rows are few, all that there can be (`pairs`). Messages are freed as soon as
their rows are picked out.
"""

from __future__ import annotations

from ds_etp.dispatch.allgather import AllGather
from ds_etp.dispatch.alltoall import EPFirst, ETPFirst
from ds_etp.dispatch.base import TokenDispatcher
from ds_etp.dispatch.replicated import Replicated

DISPATCHERS: dict[str, type[TokenDispatcher]] = {
    "replicated": Replicated,
    "allgather": AllGather,
    "alltoall": EPFirst,
    "alltoall_etp_first": ETPFirst,
}
