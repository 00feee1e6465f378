"""Rows each plan moves, and which plan moves fewest: from sizes alone, no torch, so that planners use it too.

Legend: t tokens a rank owns (tensor-parallel peers hold the same batch and own a share each), K experts per
token, E experts, c = ep * etp ranks that hold one set of experts together, q the chance that a token wants
some expert of a given ep index. Rows are per owned token and forward; backward moves as many, since it is
the transpose. The gather over tp that attention needs in any case is left out.

    plan                    out                                          back
    replicated              0                                            c-1
    allgather               c-1                                          c-1
    alltoall                q(ep-n) over ep, (etp-1)q(ep-n) over expt_tp q(ep-1) and (etp-1)q*ep
    alltoall_gather_first   q*etp(ep-n) over ep, (etp-1) over expt_tp    q*etp(ep-1) and (etp-1)

n counts the ep indices whose ranks all hold the token already, as tensor-parallel peers of its owner: nothing
is sent there. Where etp doesn't divide tp there are none; where c divides tp they are all, and nothing goes
out. Where etp divides tp, gather first has nothing to gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb, gcd

from ds_etp.parallel.topology import GroupKind, Topology

PLAN_NAMES = ("replicated", "allgather", "alltoall", "alltoall_gather_first")
# What a message costs beside its rows, in rows per owned token: 30 us, against 160 us for 4,096 rows of 8 KB at
# 200 GB/s. It only decides between plans that move nearly the same.
_MESSAGE = 0.2
# Links that leave a node are about this much slower: 450 GB/s NVLink against 50 GB/s a GPU of network.
NODE_WEIGHT = 8.0


@dataclass(frozen=True)
class Traffic:
    """What one MoE layer sends under one plan.

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


def wanted(experts: int | None, per_token: int, ep: int) -> float:
    """q: the chance that a token has an expert on a given ep index, for uniform routing.

    Args:
        experts: E; None for many, where the K choices are as good as independent.
        per_token: K.
    """
    if experts is None:
        return 1 - (1 - 1 / ep) ** per_token
    return 1 - comb(experts - experts // ep, per_token) / comb(experts, per_token)


def tokens_are_replicated(topology: Topology) -> bool:
    """Whether every rank of one expert-model-parallel block already holds the block's tokens.

    Tensor-parallel peers hold the same batch. A block is `ep * etp` neighbouring ranks, so it lies inside
    one tensor-parallel group exactly when `tp` is a multiple of `ep * etp`.
    """
    return topology.tp % topology.expert_model_parallel == 0


def near_indices(topology: Topology) -> float:
    """n: ep indices whose ranks all hold a token of this rank already, on average over ranks."""
    tp, block = topology.tp, topology.expert_model_parallel
    if tp % topology.etp:
        return 0.0
    # Blocks and tensor-parallel groups are runs of neighbours; where neither divides the other, overlaps vary.
    period = tp * block // gcd(tp, block)
    held = sum(
        min(rank // tp * tp + tp, rank // block * block + block) - max(rank // tp * tp, rank // block * block)
        for rank in range(period)
    )
    return held / period / topology.etp


def traffic(
    plan: str, topology: Topology, *, per_token: int, experts: int | None = None, equal_batches: bool = False
) -> Traffic:
    """What a plan moves in a topology, for uniform routing.

    Args:
        plan: one of `PLAN_NAMES`.
        per_token, experts: K and E, as for `wanted`.
        equal_batches: whether `allgather` knows all sizes.

    Raises:
        ValueError: no such plan.
    """
    ep, etp, block = topology.ep, topology.etp, topology.expert_model_parallel
    tp_gathers, tp_rows = (2, topology.tp - 1) if topology.tp > 1 else (0, 0)
    q, near = wanted(experts, per_token, ep), near_indices(topology)
    far, peers = ep - (near or 1), etp - 1
    lanes, merges = (ep > 1), (etp > 1)
    if plan == "replicated":
        merged = topology.tp == block  # the merge and the gather over tp are one all-reduce
        return Traffic({"expert_model_parallel": block - 1}, 2 * (block > 1) + tp_gathers * (not merged), tp_rows)
    if plan == "allgather":
        messages = (4 + (not equal_batches)) * (block > 1)
        return Traffic({"expert_model_parallel": 2 * (block - 1)}, messages + tp_gathers, tp_rows)
    sizes = int(block > 1)
    if plan == "alltoall":
        rows: dict[GroupKind, float] = {
            "ep": q * far + q * (ep - 1),
            "expt_tp": peers * q * (ep - near) + peers * q * ep,
        }
        sent = (near < ep) * (lanes + merges)  # each way out, and the same messages in backward's other half
        return Traffic(rows, sizes + 2 * (lanes + merges) + 2 * sent + tp_gathers, tp_rows)
    if plan == "alltoall_gather_first":
        gathered = merges and not near
        rows = {"ep": etp * q * (far + ep - 1), "expt_tp": peers * (1 + gathered)}
        sent = lanes * (near < ep) + gathered
        return Traffic(rows, sizes + 2 * (lanes + merges) + 2 * sent + tp_gathers, tp_rows)
    raise ValueError(f"{plan!r} is not a plan: {', '.join(PLAN_NAMES)}")


def megatron_rows(dispatcher: str, topology: Topology, per_token: int) -> float:
    """Rows per owned token, forward, of Megatron-Core's `alltoall` or `allgather` dispatcher."""
    ep, etp = topology.ep, topology.etp
    if dispatcher == "alltoall":
        return 2 * per_token * (ep - 1) / ep + 2 * per_token * (etp - 1)
    if dispatcher == "allgather":
        return 2 * (ep * etp - 1)
    raise ValueError(f"{dispatcher!r} is not a dispatcher: alltoall, allgather")


@dataclass(frozen=True)
class Choice:
    """A plan, and what is expected of it."""

    plan: str
    traffic: Traffic


def choose_plan(
    topology: Topology,
    requested: str = "auto",
    *,
    per_token: int,
    experts: int | None = None,
    ranks_per_node: int | None = None,
    node_weight: float = NODE_WEIGHT,
    equal_batches: bool = False,
) -> Choice:
    """The plan for a topology: the requested one, or the cheapest that fits.

    Args:
        topology: sizes of both paths.
        requested: `"auto"` or the name of a plan that was checked to fit.
        per_token, experts: K and E.
        ranks_per_node: None where the job is one node.
        node_weight: cost of a row over a group that leaves a node; of one that doesn't, 1.
        equal_batches: as for `traffic`.
    """

    def cost(plan: str) -> float:
        rows = options[plan].rows.items()
        weighted = [
            count * (node_weight if _leaves_node(topology, kind, ranks_per_node) else 1) for kind, count in rows
        ]
        return sum(weighted) + _MESSAGE * options[plan].collectives / 2

    names = [requested]
    if requested == "auto":
        names = [name for name in PLAN_NAMES if name != "replicated" or tokens_are_replicated(topology)]
        if topology.etp == 1:
            names.remove("alltoall_gather_first")  # the same as `alltoall` without peers to gather from
    options = {
        name: traffic(name, topology, per_token=per_token, experts=experts, equal_batches=equal_batches)
        for name in names
    }
    plan = min(options, key=cost)
    return Choice(plan, options[plan])


def _leaves_node(topology: Topology, kind: GroupKind, ranks_per_node: int | None) -> bool:
    """Whether any group of a kind has ranks on two nodes. Groups of both kinds are in runs of a block."""
    if ranks_per_node is None:
        return False
    span = topology.etp if kind == "expt_tp" else topology.expert_model_parallel
    size = topology.ep if kind == "ep" else span
    return size > 1 and ranks_per_node % span != 0
