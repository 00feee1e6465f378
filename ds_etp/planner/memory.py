"""Bytes a rank holds in a layout, line by line, each with its reason.

Legend: T tokens of a rank's batch, t = T / tp tokens it owns, H hidden size, I intermediate size of an expert,
E experts, K experts per token, n ranks that share one optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_etp.planner.model import ModelFacts
from ds_etp.topology import Topology

# DeepSpeed's default for ZeRO-3: parameters of fewer elements stay gathered.
PERSISTENT = 100_000
# Elements of ZeRO's message buffer. A plan's JSON sets it; DeepSpeed's own default, 5e8, takes 1 GB.
BUCKET = 200_000_000
# DeepSpeed's defaults for ZeRO-3: elements that are whole at once, and that one step of the optimizer takes.
MAX_LIVE = 1_000_000_000
SUB_GROUP = 1_000_000_000
_MASTER, _MOMENTS = 4, 8  # bytes an element: the fp32 copy, and AdamW's two


@dataclass(frozen=True)
class Job:
    """What is trained at once, and how.

    Attributes:
        sequence, micro_batch: tokens of a sequence, sequences of a rank's batch.
        stage: ZeRO stage.
        recompute: activation checkpointing of whole layers.
        itemsize: bytes of a parameter and of an activation while training: 2 in bf16, 4 in fp32.
        bucket: elements of ZeRO's message buffer.
    """

    sequence: int
    micro_batch: int
    stage: int
    recompute: bool = True
    itemsize: int = 2
    bucket: int = BUCKET

    @property
    def tokens(self) -> int:
        """T."""
        return self.sequence * self.micro_batch


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
    """All lines. The peak is in the backward pass or in the optimizer's step, whichever holds more."""

    lines: tuple[Line, ...]

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


def partition(facts: ModelFacts, topology: Topology, stage: int, *, expert: bool) -> int:
    """Elements of a rank's part of the optimizer state, padding included.

    ZeRO 1 and 2 pad all weights together to a multiple of 2n, ZeRO-3 each by itself to a multiple of n.
    """
    ranks = topology.edp if expert else topology.dp * topology.cp
    whole = elements(facts, topology, expert=expert)
    if stage == 0:
        return whole
    if stage == 3:
        return sum(-(-w.local(topology) // ranks) * w.copies for w in facts.weights if w.is_expert == expert)
    return -(-whole // (2 * ranks)) * 2


def states(facts: ModelFacts, topology: Topology, job: Job) -> tuple[Line, ...]:
    """Parameters, gradients and optimizer: what doesn't depend on the batch."""
    kinds = (False, True)
    whole = sum(elements(facts, topology, expert=kind) for kind in kinds)
    shares = [partition(facts, topology, job.stage, expert=kind) for kind in kinds]
    share = sum(shares)
    stage, size = job.stage, job.itemsize
    master = _MASTER if stage or size < 4 else 0  # fp32 without ZeRO steps on the parameters themselves
    dense, experts = topology.dp * topology.cp, topology.edp
    ways = f"1/{dense} of the dense and 1/{experts} of the expert weights"
    lines = [
        Line(
            "parameters",
            (share if stage == 3 else whole) * size,
            "always",
            f"{size} bytes each, {ways}" if stage == 3 else f"{size} bytes each of {whole:,} weights of this rank",
        ),
        Line(
            "gradients",
            (share if stage else whole) * size,
            "always",
            f"{size} bytes each, {ways}" if stage else f"{size} bytes each, as long as the parameters",
        ),
        Line(
            "optimizer",
            share * (master + _MOMENTS),
            "always",
            f"{'fp32 copy and ' if master else ''}AdamW's two moments, {master + _MOMENTS} bytes each, "
            + (ways if stage else "of all weights of this rank"),
        ),
    ]
    if stage == 1:
        why = "ZeRO-1 keeps all gradients until backward ends, ZeRO-2 frees them as they are reduced"
        lines.append(Line("other gradients", max(whole - share, 0) * size, "backward", why))
    if size < 4:
        lines.append(_step_line(shares, stage, size))
    return tuple(lines)


def _step_line(shares: list[int], stage: int, size: int) -> Line:
    """The gradients the optimizer's step reads: made for it, one param group at a time, and freed after it."""
    name = "fp32 gradients"
    if stage == 0:
        return Line(name, sum(shares) * 4, "step", "4 bytes for each weight")
    at_once = max(shares) if stage < 3 else min(sum(shares), SUB_GROUP)
    part = "the dense or the expert weights" if stage < 3 else f"at most {SUB_GROUP:,} weights"
    return Line(name, at_once * (4 + size), "step", f"{part} at a time: flat, {size} bytes each, then in fp32")


def memory_of(facts: ModelFacts, topology: Topology, job: Job) -> Memory:
    """Every line of a rank's memory.

    Batches are uniform: a rank's experts get their share of the tokens. Attention is one that keeps no scores
    (sdpa, flash attention).
    """
    lines = [*states(facts, topology, job), *_buffers(facts, topology, job)]
    kept = activations(facts, topology, job)
    last = _norm(facts, job)  # the one before the output layer
    row = job.tokens * facts.hidden * job.itemsize
    if job.recompute:
        lines += [
            Line("checkpoints", facts.layers * row, "backward", "the input of each layer, T x H"),
            Line(
                "activations", kept.largest + last, "backward", f"one layer at a time, made again in backward{_SCORES}"
            ),
            Line("dispatch buffers", kept.dispatch, "backward", _DISPATCH + ", of one layer"),
        ]
    else:
        moe = facts.moe_layers
        all_layers = facts.layers * kept.every + (facts.layers - moe) * kept.dense + moe * kept.experts
        lines += [
            Line("activations", all_layers + last, "backward", f"kept for backward by each layer{_SCORES}"),
            Line("dispatch buffers", moe * kept.dispatch, "backward", _DISPATCH + ", of each layer"),
        ]
    logits = job.tokens * facts.vocab
    lines.append(
        Line("logits", logits * (job.itemsize + 8), "backward", "T x V, in fp32 once more, and their gradient in fp32")
    )
    return Memory(tuple(lines))


_SCORES = "; sdpa or flash attention, which keep no scores"
_DISPATCH = "rows that came to this rank's experts and their results, t x etp x K of H each"


@dataclass(frozen=True)
class Activations:
    """Bytes of one layer that are kept for backward.

    Attributes:
        every: attention and norms, of any layer.
        dense: the MLP of a layer without experts.
        experts: shared and routed experts of a MoE layer, between their first and their last product.
        dispatch: the rows routed experts are called with, and their results.
    """

    every: float
    dense: float
    experts: float
    dispatch: float

    @property
    def largest(self) -> float:
        """Of any one layer, without `dispatch`."""
        return self.every + max(self.dense, self.experts)


def activations(facts: ModelFacts, topology: Topology, job: Job) -> Activations:
    """What autograd keeps of transformers' layers: norms in fp32, sdpa or flash attention, `grouped_mm` experts."""
    tokens, size = job.tokens, job.itemsize
    attention_tp = topology.tp if facts.splits_attention else 1
    dense_tp = topology.tp if facts.splits_dense else 1
    shared_tp = topology.tp if facts.splits_shared else 1
    every: float = 2 * _norm(facts, job)
    every += tokens * facts.norm_width * (size + 4) / attention_tp
    every += tokens * (facts.attention_width + facts.output_width) * size / attention_tp
    # Gate and up, the activated gate, and the product that goes down.
    mlp = tokens * 4 * size
    # A block of ep * etp ranks owns t tokens each and has K / ep assignments to an ep index for each of them.
    rows = tokens / topology.tp * topology.etp * facts.per_token
    routed = rows * facts.columns / topology.etp * facts.expert_keeps * size
    router = tokens * facts.hidden * 4 if facts.router_fp32 else 0
    return Activations(
        every=every,
        dense=mlp * facts.dense_columns / dense_tp,
        experts=mlp * facts.shared_columns / shared_tp + routed + router,
        dispatch=2 * rows * facts.hidden * size,
    )


def _norm(facts: ModelFacts, job: Job) -> int:
    """What a norm keeps: its input in fp32, what it makes of it, and that times its weight."""
    return job.tokens * facts.hidden * (4 + (4 if facts.norms_fp32 else job.itemsize) + job.itemsize)


def _buffers(facts: ModelFacts, topology: Topology, job: Job) -> list[Line]:
    """ZeRO's own buffers."""
    if job.stage == 0:
        return []
    size = job.itemsize
    largest = max(weight.local(topology) for weight in facts.weights)
    whole = sum(elements(facts, topology, expert=kind) for kind in (False, True))
    lines = [
        # ZeRO-3 keeps the buffer, 1 and 2 make it anew in each backward.
        Line(
            "reduce bucket",
            job.bucket * size,
            "always" if job.stage == 3 else "backward",
            f"zero_optimization.reduce_bucket_size, {job.bucket:,} gradients to a message",
        ),
        Line("largest gradient", largest * size, "backward", "of one parameter, whole until it is reduced"),
    ]
    if job.stage == 3:
        # An experts module is gathered as one, whatever the limit is.
        live = min(whole, max(MAX_LIVE, elements(facts, topology, expert=True) // facts.moe_layers))
        lines.append(Line("gathered weights", live * size, "backward", "whole weights of the layers at work, at most"))
        small = sum(w.local(topology) * w.copies for w in facts.weights if w.local(topology) < PERSISTENT)
        lines.append(Line("small weights", small * size, "always", f"fewer than {PERSISTENT:,} elements stay gathered"))
    return lines
