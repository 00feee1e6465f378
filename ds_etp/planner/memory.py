"""Memory of a rank in a layout: parameters, gradients, optimizer states, activations, buffers, each with its reason.

Legend: T tokens of a rank's micro batch (its part of the sequences: sequence / cp), t = T / tp tokens it owns, H hidden
size, I intermediate size of an expert, E experts, K experts per token, n ranks that share one optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_etp.parallel.topology import Topology
from ds_etp.planner.activations import activations, exchanged_width, norm_saved_bytes
from ds_etp.planner.job import Job, in_flight
from ds_etp.planner.model import ModelFacts

# DeepSpeed's default for ZeRO-3: parameters of fewer elements stay gathered.
PERSISTENT = 100_000
# DeepSpeed's defaults for ZeRO-3: elements that are whole at once, and that one step of the optimizer takes.
MAX_LIVE = 1_000_000_000
SUB_GROUP = 1_000_000_000
_MASTER, _MOMENTS = 4, 8  # bytes an element: the fp32 copy, and AdamW's two


Phase = Literal["always", "backward", "step"]


@dataclass(frozen=True)
class Line:
    """One thing a rank holds: how many bytes, when, and why so many."""

    name: str
    bytes: float
    phase: Phase
    why: str


@dataclass(frozen=True)
class Memory:
    """All lines. The peak is in the backward pass or in the optimizer's step, whichever holds more.

    Attributes:
        lines: of a rank of the fullest pipeline stage.
        pipeline_stage: which one that is, from 0.
        layers: how many layers it has.
    """

    lines: tuple[Line, ...]
    pipeline_stage: int = 0
    layers: int = 0

    def of(self, phase: Phase) -> float:
        """Bytes held in one phase only."""
        return sum(line.bytes for line in self.lines if line.phase == phase)

    @property
    def peak(self) -> float:
        """The most bytes held at once."""
        return self.of("always") + max(self.of("backward"), self.of("step"))


def elements(facts: ModelFacts, topology: Topology, *, expert: bool) -> int:
    """Elements of the dense or of the expert weights on a rank, before ZeRO divides them."""
    return sum(w.local(topology) * w.copies for w in facts.weights if w.is_expert == expert)


def zero_partition(facts: ModelFacts, topology: Topology, zero_stage: int, *, expert: bool) -> int:
    """Elements of a rank's part of the optimizer state, padding included.

    ZeRO 1 and 2 pad all weights together to a multiple of 2n, ZeRO-3 each by itself to a multiple of n.
    """
    ranks = topology.edp if expert else topology.dp * topology.cp
    whole = elements(facts, topology, expert=expert)
    if zero_stage == 0:
        return whole
    if zero_stage == 3:
        return sum(-(-w.local(topology) // ranks) * w.copies for w in facts.weights if w.is_expert == expert)
    return -(-whole // (2 * ranks)) * 2


def states(facts: ModelFacts, topology: Topology, job: Job) -> tuple[Line, ...]:
    """Parameters, gradients and optimizer: what doesn't depend on the batch."""
    if adds_up_in_fp32(topology, job):
        return _states_in_fp32(facts, topology, job)
    kinds = (False, True)
    whole = sum(elements(facts, topology, expert=kind) for kind in kinds)
    shares = [zero_partition(facts, topology, job.zero_stage, expert=kind) for kind in kinds]
    share = sum(shares)
    zero_stage, size = job.zero_stage, job.itemsize
    master = _MASTER if zero_stage or size < 4 else 0  # fp32 without ZeRO steps on the parameters themselves
    dense, experts = topology.dp * topology.cp, topology.edp
    ways = f"1/{dense} of the dense and 1/{experts} of the expert weights"
    lines = [
        Line(
            "parameters",
            (share if zero_stage == 3 else whole) * size,
            "always",
            f"{size} bytes each, {ways}" if zero_stage == 3 else f"{size} bytes each of {whole:,} weights of this rank",
        ),
        Line(
            "gradients",
            (share if zero_stage else whole) * size,
            "always",
            f"{size} bytes each, {ways}" if zero_stage else f"{size} bytes each, as long as the parameters",
        ),
        Line(
            "optimizer",
            share * (master + _MOMENTS),
            "always",
            f"{'fp32 copy and ' if master else ''}AdamW's two moments, {master + _MOMENTS} bytes each, "
            + (ways if zero_stage else "of all weights of this rank"),
        ),
    ]
    if zero_stage == 1:
        why = "ZeRO-1 keeps all gradients until backward ends, ZeRO-2 frees them as they are reduced"
        lines.append(Line("other gradients", max(whole - share, 0) * size, "backward", why))
    if size < 4:
        lines.append(_step_line(shares, zero_stage, size))
    return tuple(lines)


def adds_up_in_fp32(topology: Topology, job: Job) -> bool:
    """Whether gradients are fp32: DeepSpeed's pipelines in bf16 at ZeRO 0 have an optimizer of their own kind.

    `BF16_Optimizer` (0.19.8) shares its states as ZeRO-1 does.
    """
    return topology.pp > 1 and job.zero_stage == 0 and job.itemsize < 4


def _states_in_fp32(facts: ModelFacts, topology: Topology, job: Job) -> tuple[Line, ...]:
    kinds, size = (False, True), job.itemsize
    whole = sum(elements(facts, topology, expert=kind) for kind in kinds)
    share = sum(zero_partition(facts, topology, 1, expert=kind) for kind in kinds)
    ways = f"1/{topology.dp * topology.cp} of the dense and 1/{topology.edp} of the expert weights"
    return (
        Line("parameters", whole * size, "always", f"{size} bytes each of {whole:,} weights of this rank"),
        Line("gradients", whole * 4, "always", "a bf16 pipeline at ZeRO-0 adds them up in fp32, 4 bytes each"),
        Line(
            "optimizer",
            share * (_MASTER + _MOMENTS),
            "always",
            f"fp32 copy and AdamW's two moments, {_MASTER + _MOMENTS} bytes each, {ways}, as in ZeRO-1",
        ),
        Line("other gradients", whole * size, "backward", f"of one micro batch, {size} bytes each"),
    )


def _step_line(shares: list[int], zero_stage: int, size: int) -> Line:
    """The gradients the optimizer's step reads: made for it, one param group at a time, and freed after it."""
    name = "fp32 gradients"
    if zero_stage == 0:
        return Line(name, sum(shares) * 4, "step", "4 bytes for each weight")
    at_once = max(shares) if zero_stage < 3 else min(sum(shares), SUB_GROUP)
    part = "the dense or the expert weights" if zero_stage < 3 else f"at most {SUB_GROUP:,} weights"
    return Line(name, at_once * (4 + size), "step", f"{part} at a time: flat, {size} bytes each, then in fp32")


def memory_of(facts: ModelFacts, topology: Topology, job: Job) -> Memory:
    """Every line of a rank's memory, in the pipeline stage that holds most.

    Batches are uniform: a rank's experts get their share of the tokens. Attention is one that keeps no scores
    (sdpa, flash attention).
    """
    return max(
        (_pipeline_stage_memory(facts, topology, job, stage) for stage in facts.distinct_pipeline_stages(topology.pp)),
        key=lambda memory: memory.peak,
    )


def _pipeline_stage_memory(whole: ModelFacts, topology: Topology, job: Job, pipeline_stage: int) -> Memory:
    facts, ahead = whole.pipeline_stage(topology.pp, pipeline_stage), in_flight(topology, job, pipeline_stage)
    lines = [*states(facts, topology, job), *_buffers(facts, topology, job)]
    kept = activations(facts, topology, job)
    tokens = job.tokens(topology)
    row = tokens * facts.hidden * job.itemsize
    # The last norm, before the output layer; where that is, one micro batch is under way.
    last = norm_saved_bytes(facts, tokens, job) if facts.makes_logits else 0
    times = f" of each of {ahead} micro batches under way" if ahead > 1 else ""
    if job.recompute:
        lines += [
            Line("checkpoints", ahead * facts.layers * row, "backward", f"the input of each layer, T x H{times}"),
            Line(
                "activations", kept.largest + last, "backward", f"one layer at a time, made again in backward{_SCORES}"
            ),
            Line("dispatch buffers", kept.dispatch, "backward", _DISPATCH + ", of one layer"),
        ]
    else:
        moe = facts.moe_layers
        all_layers = facts.layers * kept.every + (facts.layers - moe) * kept.dense + moe * kept.experts
        each = f"kept for backward by each layer{times}{_SCORES}"
        lines += [
            Line("activations", ahead * all_layers + last, "backward", each),
            Line("dispatch buffers", ahead * moe * kept.dispatch, "backward", _DISPATCH + f", of each layer{times}"),
        ]
    if topology.cp > 1:
        lines.append(Line("heads", _heads(facts, topology, job), "backward", _HEADS))
    if topology.pp > 1:
        why = f"a stage's output{times}, and one input, gradient and output on their way"
        lines.append(Line("pipeline buffers", (ahead + 3) * row, "backward", why))
    if facts.makes_logits:
        why = "T x V, in fp32 once more, and their gradient in fp32"
        lines.append(Line("logits", tokens * facts.vocab * (job.itemsize + 8), "backward", why))
    return Memory(tuple(lines), pipeline_stage, facts.layers)


_SCORES = "; sdpa or flash attention, which keep no scores"
_HEADS = "queries, keys, values and their result twice: before and after the heads are exchanged over cp, of one layer"
_DISPATCH = "rows that came to this rank's experts and their results, t x etp x K of H each"


def _heads(facts: ModelFacts, topology: Topology, job: Job) -> float:
    return 2 * job.tokens(topology) * exchanged_width(facts, topology) * job.itemsize


def _buffers(facts: ModelFacts, topology: Topology, job: Job) -> list[Line]:
    """ZeRO's own buffers."""
    if job.zero_stage == 0:
        return []
    size = job.itemsize
    largest = max(weight.local(topology) for weight in facts.weights)
    whole = sum(elements(facts, topology, expert=kind) for kind in (False, True))
    lines = [
        # ZeRO-3 keeps the buffer, 1 and 2 make it anew in each backward.
        Line(
            "reduce bucket",
            job.bucket * size,
            "always" if job.zero_stage == 3 else "backward",
            f"zero_optimization.reduce_bucket_size, {job.bucket:,} gradients to a message",
        ),
        Line("largest gradient", largest * size, "backward", "of one parameter, whole until it is reduced"),
    ]
    if job.zero_stage == 3:
        # An experts module is gathered as one, whatever the limit is.
        live = min(whole, max(MAX_LIVE, elements(facts, topology, expert=True) // facts.moe_layers))
        lines.append(Line("gathered weights", live * size, "backward", "whole weights of the layers at work, at most"))
        small = sum(w.local(topology) * w.copies for w in facts.weights if w.local(topology) < PERSISTENT)
        lines.append(Line("small weights", small * size, "always", f"fewer than {PERSISTENT:,} elements stay gathered"))
    return lines
