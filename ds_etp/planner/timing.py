"""Seconds a step takes by stated rates: an estimate that ranks layouts, not one to promise.

Nothing overlaps in it, experts get equal shares, and matrix products run at one rate except where a tile of 128 x 128
isn't filled or the weights take longer to read than to multiply.

Legend: T tokens of a rank's batch, t = T / tp tokens it owns, H hidden size, I intermediate size of an expert,
E experts, K experts per token, c = ep * etp.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_etp.planner.hardware import Hardware
from ds_etp.planner.memory import Job, elements
from ds_etp.planner.model import ModelFacts
from ds_etp.topology import GroupKind, Topology
from ds_etp.wire import Traffic

_TILE = 128


@dataclass(frozen=True)
class Timing:
    """Seconds of one step, and what a rank sends in it.

    Attributes:
        dense, experts: multiplying.
        dispatch: tokens to experts and back.
        attention: what AutoTP sends over tp.
        data: gradients and weights over the ranks that hold the same ones.
        rows, bytes: what dispatch sends, forward and backward: rows of H, and bytes with the gathers over tp.
        expert_efficiency: the part of the stated rate the experts' products reach.
        tokens: tokens the whole job has trained on after the step.
    """

    dense: float
    experts: float
    dispatch: float
    attention: float
    data: float
    rows: float
    bytes: float
    expert_efficiency: float
    tokens: int

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.dense + self.experts + self.dispatch + self.attention + self.data

    @property
    def rate(self) -> float:
        """Tokens a second of the whole job."""
        return self.tokens / self.seconds


def timing_of(facts: ModelFacts, topology: Topology, job: Job, hardware: Hardware, traffic: Traffic) -> Timing:
    """The time of one step of one micro batch.

    Args:
        traffic: what the layout's plan moves in one layer.
    """
    passes = 4 if job.recompute else 3  # forward, and twice as much backward
    sends = 3 if job.recompute else 2
    owned = job.tokens / topology.tp
    experts, efficiency = _experts(facts, topology, owned, job.itemsize, hardware)
    row = facts.hidden * job.itemsize
    rows = traffic.total * owned * facts.moe_layers * sends
    sent = {kind: count * owned * row / hardware.rate(topology, kind) for kind, count in traffic.rows.items()}
    gathers = traffic.tp_rows * owned * row / hardware.rate(topology, "tp")
    messages = traffic.collectives / 2 * hardware.message
    return Timing(
        dense=passes * _dense(facts, topology, job) / hardware.flops,
        experts=passes * experts,
        dispatch=sends * facts.moe_layers * (sum(sent.values()) + gathers + messages),
        attention=_attention(facts, topology, job, sends) / hardware.rate(topology, "tp"),
        data=_data(facts, topology, job, hardware),
        rows=rows,
        bytes=traffic.bytes(owned, facts.hidden, job.itemsize) / 2 * sends * facts.moe_layers,
        expert_efficiency=efficiency,
        tokens=job.tokens * topology.dp * topology.cp,
    )


def _dense(facts: ModelFacts, topology: Topology, job: Job) -> float:
    """Operations of a forward pass outside experts. What AutoTP leaves whole is done by each of its ranks."""
    weights = sum(w.local(topology) * w.copies for w in facts.weights if w.multiplied and not w.is_expert)
    split = topology.tp if facts.splits_attention else 1
    # A token looks at half of its sequence on average, once for the scores and once for the values.
    scores = 2 * 2 * job.sequence / 2 * facts.output_width / split * facts.layers
    return job.tokens * (2 * weights + scores)


def _experts(
    facts: ModelFacts, topology: Topology, owned: float, itemsize: int, hardware: Hardware
) -> tuple[float, float]:
    """Seconds of a forward pass in experts, and the part of the rate they reach."""
    rows = owned * topology.expert_model_parallel * facts.per_token / facts.experts  # of one expert
    columns, hidden = facts.columns // topology.etp, facts.hidden
    ups = 2 if facts.gated else 1
    products = ((rows, hidden, ups * columns), (rows, columns, hidden))
    one = sum(_product(*sizes, itemsize, hardware) for sizes in products)
    ideal = sum(2 * m * k * n for m, k, n in products) / hardware.flops
    return one * facts.experts / topology.ep * facts.moe_layers, ideal / one


def _product(m: float, k: int, n: int, itemsize: int, hardware: Hardware) -> float:
    """Seconds of `[m, k] x [k, n]`: of its tiles, or of reading and writing its matrices."""
    tiles = 2 * _up(m) * k * _up(n)
    return max(tiles / hardware.flops, (m * k + k * n + m * n) * itemsize / hardware.hbm)


def _up(size: float) -> int:
    return -int(-size // _TILE) * _TILE


def _attention(facts: ModelFacts, topology: Topology, job: Job, sends: int) -> float:
    """Bytes AutoTP sends: an all-reduce for each split block, and the logits it gathers."""
    if topology.tp == 1:
        return 0.0
    part = (topology.tp - 1) / topology.tp
    blocks = facts.dense_splits * facts.layers * sends * 2 * facts.hidden
    return part * job.tokens * (blocks + facts.vocab) * job.itemsize


def _data(facts: ModelFacts, topology: Topology, job: Job, hardware: Hardware) -> float:
    """Seconds of reducing gradients and gathering weights: both once, and ZeRO-3 gathers twice (and recomputing)."""
    moves = 2 if job.stage < 3 else 3
    seconds = 0.0
    kinds: tuple[tuple[bool, GroupKind, int], ...] = (
        (False, "dp", topology.dp * topology.cp),
        (True, "expert_dp", topology.edp),
    )
    for expert, kind, ranks in kinds:
        sent = moves * (ranks - 1) / ranks * elements(facts, topology, expert=expert) * job.itemsize
        seconds += sent / hardware.rate(topology, kind)
    return seconds
