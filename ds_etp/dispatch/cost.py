"""Communication volume of each dispatcher, and which one sends fewest rows: from sizes alone, no torch.

Legend: t tokens a rank owns (tensor-parallel peers hold the same batch and own a share each), K experts per
token, E experts, c = ep * etp ranks that hold one set of experts together, q the chance that a token has
an expert on a given ep rank. Rows are per owned token and forward; backward moves as many, since it is
the transpose. The gather over tp that attention needs in any case is left out.

    dispatcher          out                                            back
    replicated          0                                              c-1
    allgather           c-1                                            c-1
    alltoall            q(ep-n) over ep, (etp-1)q(ep-n) over expt_tp   q(ep-1) and (etp-1)q*ep
    alltoall_etp_first  q*etp(ep-n) over ep, (etp-1) over expt_tp      q*etp(ep-1) and (etp-1)

n counts the ep ranks whose expt_tp group holds the token already, as tensor-parallel peers of its owner: nothing
is sent there. Where etp doesn't divide tp there are none; where c divides tp they are all, and nothing goes
out. Where etp divides tp, ETP first has nothing to gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb, gcd

from ds_etp.parallel.topology import GroupKind, Topology

DISPATCHER_NAMES = ("replicated", "allgather", "alltoall", "alltoall_etp_first")
# What a message costs beside its rows, in rows per owned token: 30 us, against 160 us for 4,096 rows of 8 KB at
# 200 GB/s. It only decides between dispatchers that move nearly the same.
_LATENCY_ROWS = 0.2
# Links that leave a node are about this much slower: 450 GB/s NVLink against 50 GB/s a GPU of network.
INTER_NODE_COST = 8.0


@dataclass(frozen=True)
class CommVolume:
    """What one MoE layer sends under one dispatcher.

    Attributes:
        rows: rows of H by group, per owned token, forward.
        collectives: messages, forward and backward, the gathers over tp and the exchange of sizes included.
        tp_rows: rows of the gather over tp, which `rows` leaves out.
    """

    rows: Mapping[GroupKind, float]
    collectives: int
    tp_rows: int

    @property
    def total(self) -> float:
        """Rows per owned token, forward, over all groups."""
        return sum(self.rows.values())

    def bytes(self, tokens: float, hidden: int, itemsize: int) -> float:
        """Bytes a rank sends, forward and backward, the gathers over tp included.

        Args:
            tokens: t, tokens a rank owns.
            hidden: H.
            itemsize: bytes of one activation.
        """
        return 2 * (self.total + self.tp_rows) * tokens * hidden * itemsize


def prob_ep_rank_hit(experts: int | None, per_token: int, ep: int) -> float:
    """q: the chance that a token has an expert on a given ep index, for uniform routing.

    Args:
        experts: E; None for many, where the K choices are as good as independent.
        per_token: K.
    """
    if experts is None:
        return 1 - (1 - 1 / ep) ** per_token
    return 1 - comb(experts - experts // ep, per_token) / comb(experts, per_token)


def tokens_are_replicated(topology: Topology) -> bool:
    """Whether all expert ranks hold each other's tokens already.

    Tensor-parallel peers hold the same batch. The ranks of one set of experts are `ep * etp` neighbours, so they lie
    inside one tensor-parallel group exactly when `tp` is a multiple of `ep * etp`.
    """
    return topology.tp % topology.expert_model_parallel == 0


def mean_replicated_ep_ranks(topology: Topology) -> float:
    """n: mean number of ep ranks whose expt_tp group lies inside this rank's TP group.

    A token need not be sent there.
    """
    tp, ranks = topology.tp, topology.expert_model_parallel
    if tp % topology.etp:
        return 0.0
    # Expert ranks and tensor-parallel groups are runs of neighbours; where neither divides the other, overlaps vary.
    period = tp * ranks // gcd(tp, ranks)
    held = sum(
        min(rank // tp * tp + tp, rank // ranks * ranks + ranks) - max(rank // tp * tp, rank // ranks * ranks)
        for rank in range(period)
    )
    return held / period / topology.etp


def comm_volume(dispatcher: str, topology: Topology, *, per_token: int, experts: int | None = None) -> CommVolume:
    """What a dispatcher moves in a topology, for uniform routing.

    Args:
        dispatcher: one of `DISPATCHER_NAMES`.
        per_token, experts: K and E, as for `prob_ep_rank_hit`.

    Raises:
        ValueError: no such dispatcher.
    """
    ep, etp, ranks = topology.ep, topology.etp, topology.expert_model_parallel
    tp_gathers, tp_rows = (2, topology.tp - 1) if topology.tp > 1 else (0, 0)
    q, replicated_ep = prob_ep_rank_hit(experts, per_token, ep), mean_replicated_ep_ranks(topology)
    remote, peers = ep - (replicated_ep or 1), etp - 1
    uses_a2a, uses_etp_reduce = (ep > 1), (etp > 1)
    if dispatcher == "replicated":
        merged = topology.tp == ranks  # the merge and the gather over tp are one all-reduce
        return CommVolume({"expert_model_parallel": ranks - 1}, 2 * (ranks > 1) + tp_gathers * (not merged), tp_rows)
    if dispatcher == "allgather":
        messages = (4 + (not tokens_are_replicated(topology))) * (ranks > 1)  # peers of one batch know all sizes
        return CommVolume({"expert_model_parallel": 2 * (ranks - 1)}, messages + tp_gathers, tp_rows)
    sizes = int(ranks > 1)
    if dispatcher == "alltoall":
        rows: dict[GroupKind, float] = {
            "ep": q * remote + q * (ep - 1),
            "expt_tp": peers * q * (ep - replicated_ep) + peers * q * ep,
        }
        sent = (replicated_ep < ep) * (
            uses_a2a + uses_etp_reduce
        )  # each way out, and the same messages in backward's other half
        return CommVolume(rows, sizes + 2 * (uses_a2a + uses_etp_reduce) + 2 * sent + tp_gathers, tp_rows)
    if dispatcher == "alltoall_etp_first":
        gathered = uses_etp_reduce and not replicated_ep
        rows = {"ep": etp * q * (remote + ep - 1), "expt_tp": peers * (1 + gathered)}
        sent = uses_a2a * (replicated_ep < ep) + gathered
        return CommVolume(rows, sizes + 2 * (uses_a2a + uses_etp_reduce) + 2 * sent + tp_gathers, tp_rows)
    raise ValueError(f"{dispatcher!r} is not a dispatcher: {', '.join(DISPATCHER_NAMES)}")


def megatron_rows(dispatcher: str, topology: Topology, per_token: int) -> float:
    """Rows per owned token, forward, of Megatron-Core's `alltoall` or `allgather` dispatcher."""
    ep, etp = topology.ep, topology.etp
    if dispatcher == "alltoall":
        return 2 * per_token * (ep - 1) / ep + 2 * per_token * (etp - 1)
    if dispatcher == "allgather":
        return 2 * (ep * etp - 1)
    raise ValueError(f"{dispatcher!r} is not a dispatcher: alltoall, allgather")


@dataclass(frozen=True)
class DispatchChoice:
    """A dispatcher, and what is expected of it."""

    dispatcher: str
    comm_volume: CommVolume


def choose_dispatcher(
    topology: Topology,
    requested: str = "auto",
    *,
    per_token: int,
    experts: int | None = None,
    ranks_per_node: int | None = None,
    inter_node_cost: float = INTER_NODE_COST,
) -> DispatchChoice:
    """The dispatcher for a topology: the requested one, or the cheapest that fits.

    Args:
        topology: sizes of both paths.
        requested: `"auto"` or the name of a dispatcher that was checked to fit.
        per_token, experts: K and E.
        ranks_per_node: None where the job is one node.
        inter_node_cost: cost of a row over a group that leaves a node; of one that doesn't, 1.
    """

    def cost(dispatcher: str) -> float:
        rows = options[dispatcher].rows.items()
        weighted = [
            count * (inter_node_cost if _leaves_node(topology, kind, ranks_per_node) else 1) for kind, count in rows
        ]
        return sum(weighted) + _LATENCY_ROWS * options[dispatcher].collectives / 2

    names = [requested]
    if requested == "auto":
        names = [name for name in DISPATCHER_NAMES if name != "replicated" or tokens_are_replicated(topology)]
        if topology.etp == 1:
            names.remove("alltoall_etp_first")  # the same as `alltoall` without peers to gather from
    options = {name: comm_volume(name, topology, per_token=per_token, experts=experts) for name in names}
    dispatcher = min(options, key=cost)
    return DispatchChoice(dispatcher, options[dispatcher])


def _leaves_node(topology: Topology, kind: GroupKind, ranks_per_node: int | None) -> bool:
    """Whether any group of a kind has ranks on two nodes. Those of ep and expt_tp are among neighbours."""
    if ranks_per_node is None:
        return False
    span = topology.etp if kind == "expt_tp" else topology.expert_model_parallel
    size = topology.ep if kind == "ep" else span
    return size > 1 and ranks_per_node % span != 0
