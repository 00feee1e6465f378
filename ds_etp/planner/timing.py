"""Time of a training step: compute, communication and pipeline bubble by stated rates. It ranks layouts, no more.

Nothing overlaps in it, experts get equal shares, and matrix products run at one rate except where a tile of 128 x 128
isn't filled or the weights take longer to read than to multiply.

Legend: T tokens of a rank's micro batch, t = T / tp tokens it owns, H hidden size, I intermediate size of an expert,
E experts, K experts per token, c = ep * etp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_etp.dispatch.cost import CommVolume
from ds_etp.parallel.topology import Topology
from ds_etp.planner.activations import exchanged_width
from ds_etp.planner.hardware import Hardware
from ds_etp.planner.job import Job
from ds_etp.planner.memory import adds_up_in_fp32, elements
from ds_etp.planner.model import ModelFacts

_TILE = 128
EXCHANGES = 4  # messages of Ulysses in a layer: queries, keys, values, and the result


@dataclass(frozen=True)
class Timing:
    """Seconds of one step of the slowest pipeline stage, and what a rank sends in it.

    Attributes:
        dense, experts: multiplying.
        dispatch: tokens to experts and back.
        attention: what AutoTP sends over tp.
        context: heads exchanged over cp.
        pipe: activations and gradients to the neighbouring pipeline stages.
        bubble: waiting for other pipeline stages, as the pipeline fills and empties.
        data: gradients and weights over the ranks that hold the same ones.
        rows, bytes: what dispatch sends, forward and backward: rows of H, and bytes with the gathers over tp.
        expert_efficiency: the part of the stated rate the experts' products reach.
        tokens: tokens the whole job has trained on after the step.
        pipeline_stage: the slowest one, from 0.
    """

    dense: float
    experts: float
    dispatch: float
    attention: float
    context: float
    pipe: float
    bubble: float
    data: float
    rows: float
    bytes: float
    expert_efficiency: float
    tokens: int
    pipeline_stage: int

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        working = self.dense + self.experts + self.dispatch + self.attention + self.context + self.pipe
        return working + self.bubble + self.data

    @property
    def rate(self) -> float:
        """Tokens a second of the whole job."""
        return self.tokens / self.seconds


def timing_of(facts: ModelFacts, topology: Topology, job: Job, hardware: Hardware, comm_volume: CommVolume) -> Timing:
    """The time of one step.

    Args:
        comm_volume: what the layout's dispatcher sends in one layer.
    """
    stages = facts.distinct_pipeline_stages(topology.pp)
    timings = (_pipeline_stage_timing(facts, topology, job, hardware, comm_volume, stage) for stage in stages)
    return max(timings, key=lambda timing: timing.seconds)


def _pipeline_stage_timing(
    whole: ModelFacts, topology: Topology, job: Job, hardware: Hardware, comm_volume: CommVolume, pipeline_stage: int
) -> Timing:
    facts, times, tokens = whole.pipeline_stage(topology.pp, pipeline_stage), job.micro_batches, job.tokens(topology)
    passes = 4 if job.recompute else 3  # forward, and twice as much backward
    sends = 3 if job.recompute else 2
    owned = tokens / topology.tp
    experts, efficiency = _experts(facts, topology, owned, job.itemsize, hardware)
    row = facts.hidden * job.itemsize
    sent = {kind: count * owned * row / hardware.rate(topology, kind) for kind, count in comm_volume.rows.items()}
    gathers = comm_volume.tp_rows * owned * row / hardware.rate(topology, "tp")
    messages = comm_volume.collectives / 2 * hardware.latency
    dispatches = times * sends * facts.moe_layers
    timing = Timing(
        dense=times * passes * _dense(facts, topology, job) / hardware.flops,
        experts=times * passes * experts,
        dispatch=dispatches * (sum(sent.values()) + gathers + messages),
        attention=times * _attention(facts, topology, job, sends) / hardware.rate(topology, "tp"),
        context=times * sends * facts.layers * _exchange(facts, topology, job, hardware),
        pipe=times * _neighbours(facts, topology, job, hardware),
        bubble=0.0,
        data=_data(facts, topology, job, hardware),
        rows=dispatches * comm_volume.total * owned,
        bytes=dispatches * comm_volume.bytes(owned, facts.hidden, job.itemsize) / 2,
        expert_efficiency=efficiency,
        tokens=times * tokens * topology.dp * topology.cp,
        pipeline_stage=pipeline_stage,
    )
    return replace(timing, bubble=(topology.pp - 1) / times * (timing.seconds - timing.data))


def _dense(facts: ModelFacts, topology: Topology, job: Job) -> float:
    """Operations of a forward pass outside experts. What AutoTP leaves whole is done by each of its ranks."""
    weights = sum(w.local(topology) * w.copies for w in facts.weights if w.multiplied and not w.is_expert)
    split = topology.tp if facts.splits_attention else 1
    # A token looks at half of its sequence on average, once for the scores and once for the values. Of ranks that share
    # a sequence each does so for a part of the heads: as much as for its own tokens with all of them.
    scores = 2 * 2 * job.sequence / 2 * facts.output_width / split * facts.layers
    return job.tokens(topology) * (2 * weights + scores)


def _exchange(facts: ModelFacts, topology: Topology, job: Job, hardware: Hardware) -> float:
    """Seconds in one layer: queries, keys and values to the ranks with their heads, and the result back."""
    if topology.cp == 1:
        return 0.0
    entries = job.tokens(topology) * exchanged_width(facts, topology) * (topology.cp - 1) / topology.cp
    return entries * job.itemsize / hardware.rate(topology, "cp") + EXCHANGES * hardware.latency


def _neighbours(facts: ModelFacts, topology: Topology, job: Job, hardware: Hardware) -> float:
    """Seconds in one micro batch: T x H to the next stage, and as much of gradients to the one before."""
    if topology.pp == 1:
        return 0.0
    row = job.tokens(topology) * facts.hidden * job.itemsize
    return 2 * (row / hardware.rate(topology, "pp") + hardware.latency)


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
    """Bytes AutoTP sends: an all-reduce for each split decoder block, and the logits it gathers."""
    if topology.tp == 1:
        return 0.0
    part = (topology.tp - 1) / topology.tp
    blocks = facts.dense_splits * facts.layers * sends * 2 * facts.hidden
    logits = facts.vocab if facts.makes_logits else 0
    return part * job.tokens(topology) * (blocks + logits) * job.itemsize


def _data(facts: ModelFacts, topology: Topology, job: Job, hardware: Hardware) -> float:
    """Seconds of reducing gradients and gathering weights.

    ZeRO 0 and 1 do each once in a step. ZeRO-2 reduces in each micro batch, and ZeRO-3 gathers twice in each besides.
    """
    moves = {2: job.micro_batches + 1, 3: 3 * job.micro_batches}.get(job.zero_stage, 2)
    # Its gradients are all-reduced in fp32, its weights gathered in bf16.
    each = 2 * 4 + job.itemsize if adds_up_in_fp32(topology, job) else moves * job.itemsize
    dense_rate = min(hardware.rate(topology, "dp"), hardware.rate(topology, "cp"))
    seconds = 0.0
    for expert, rate, ranks in (
        (False, dense_rate, topology.dp * topology.cp),
        (True, hardware.rate(topology, "expert_dp"), topology.edp),
    ):
        seconds += each * (ranks - 1) / ranks * elements(facts, topology, expert=expert) / rate
    return seconds
