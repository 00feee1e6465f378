"""Advice in words: why the first layout is first, and whether ETP or EP is the right tool here."""

from __future__ import annotations

from collections.abc import Sequence

from ds_etp.planner.hardware import Hardware
from ds_etp.planner.memory import elements
from ds_etp.planner.model import ModelFacts
from ds_etp.planner.ranking import Proposal

_KINDS = {  # (etp > 1, ep > 1) -> what it is called, and the verdict when it is first
    (False, False): ("experts whole on every rank", "Neither is needed: every rank holds all experts."),
    (True, False): ("ETP alone", "ETP is the right tool here: every expert is cut, none is dealt out."),
    (False, True): ("EP alone", "EP is the right tool here: experts are dealt out whole."),
    (True, True): ("ETP with EP", "ETP and EP together: experts are dealt out, and each is cut as well."),
}


def explain(
    facts: ModelFacts, hardware: Hardware, proposals: Sequence[Proposal], asked: Sequence[str] = ("tp",)
) -> list[str]:
    """A verdict, and a sentence on the best layout of every other kind.

    Args:
        proposals: as ranked, at least one.
        asked: axes of the dense path, tp, cp and pp, that were allowed to be above 1.
    """
    best = proposals[0]
    if not best.fits:
        return [
            f"No layout fits: the smallest, {best.sizes}, takes {_gb(best.memory.peak)} of the "
            f"{_gb(hardware.memory * hardware.usable)} a rank can fill ({hardware.usable:.0%} of its memory). Take "
            f"more GPUs, a shorter sequence, or an optimizer on the CPU (zero_optimization.offload_optimizer).",
            *_why_one(facts, hardware, asked),
        ]
    sentences = [_KINDS[_kind(best)][1] + f" {_says(facts, best)}"]
    for kind, (name, _) in _KINDS.items():
        other = next((proposal for proposal in proposals if _kind(proposal) == kind), None)
        if other is None or kind == _kind(best):
            continue
        sentences.append(f"{name} ({other.sizes}): {_against(facts, best, other)}.")
    for axis, name in (("cp", "shared sequences"), ("pp", "pipelines")):
        used = getattr(best.topology, axis) > 1
        others = (proposal for proposal in proposals if (getattr(proposal.topology, axis) > 1) != used)
        if other := next(others, None):
            says = _against(facts, best, other)
            sentences.append(f"{'Without' if used else 'With'} {name} ({other.sizes}): {says}.")
    sentences += _why_one(facts, hardware, asked)
    unaligned = sorted({proposal.topology.etp for proposal in proposals if not proposal.aligned})
    if unaligned:
        columns = ", ".join(str(facts.columns // etp) for etp in unaligned)
        sentences.append(
            f'experts_implementation="grouped_mm" takes multiples of 8 columns in bf16, so not etp '
            f'{", ".join(map(str, unaligned))} ({columns} columns): those run "eager", and are ranked last.'
        )
    return sentences


def _why_one(facts: ModelFacts, hardware: Hardware, asked: Sequence[str]) -> list[str]:
    """Which axes the model leaves at 1."""
    reasons = {"tp": facts.no_tp, "cp": facts.no_cp, "pp": facts.no_pp}
    if hardware.gpus == 1:
        return []
    return [f"{axis} is 1 in all layouts: {reasons[axis]}." for axis in asked if reasons[axis]]


def _kind(proposal: Proposal) -> tuple[bool, bool]:
    return proposal.topology.etp > 1, proposal.topology.ep > 1


def _says(facts: ModelFacts, best: Proposal) -> str:
    topology, timing = best.topology, best.timing
    return (
        f"Each rank holds {facts.columns // topology.etp} of {facts.columns} columns of {facts.experts // topology.ep} "
        f"of {facts.experts} experts, whose products reach {timing.expert_efficiency:.0%} of the rate, and sends "
        f"{_gb(timing.bytes)} a step to bring tokens to experts and back."
    )


def _against(facts: ModelFacts, best: Proposal, other: Proposal) -> str:
    """What is worse about another layout."""
    if not other.fits:
        return f"does not fit, {_gb(other.memory.peak)} a rank: {_why_large(facts, other)}"
    if not other.aligned:
        return f"{facts.columns // other.topology.etp} columns are left, which grouped_mm doesn't take"
    slower = best.timing.rate / other.timing.rate - 1
    if slower < 0.01:
        return f"as fast, to 1%, and takes {_gb(other.memory.peak)} a rank against {_gb(best.memory.peak)}"
    return f"{slower:.0%} slower, mostly since {_largest_loss(facts, best, other)}"


def _why_large(facts: ModelFacts, other: Proposal) -> str:
    topology, part = other.topology, elements(facts, other.topology, expert=True)
    if topology.etp == 1 and topology.ep == facts.experts:
        return f"{facts.experts} experts can't be dealt out to more than {facts.experts} ranks, {part:,} weights each"
    return f"{part:,} expert weights each"


def _largest_loss(facts: ModelFacts, best: Proposal, other: Proposal) -> str:
    a, b = best.timing, other.timing
    topology = other.topology
    losses = {
        f"its experts' products reach {b.expert_efficiency:.0%} of the rate, with {facts.columns // topology.etp} "
        f"columns an expert": b.experts / b.tokens - a.experts / a.tokens,
        f"it sends {_gb(b.bytes)} a step for {b.tokens:,} tokens, against {_gb(a.bytes)} for {a.tokens:,}": (
            b.dispatch / b.tokens - a.dispatch / a.tokens
        ),
        f"{topology.edp} ranks share the gradients of {elements(facts, topology, expert=True):,} expert weights, "
        f"against {best.topology.edp} of {elements(facts, best.topology, expert=True):,}": (
            b.data / b.tokens - a.data / a.tokens
        ),
        f"{b.bubble / b.seconds:.0%} of its time goes into filling and emptying the pipeline": (
            (b.bubble + b.pipe) / b.tokens - (a.bubble + a.pipe) / a.tokens
        ),
        f"heads are exchanged over cp {topology.cp}": b.context / b.tokens - a.context / a.tokens,
        f"AutoTP sends more over tp {topology.tp}": b.attention / b.tokens - a.attention / a.tokens,
        _why_dense(facts, other): b.dense / b.tokens - a.dense / a.tokens,
    }
    return max(losses, key=lambda words: losses[words])


def _why_dense(facts: ModelFacts, other: Proposal) -> str:
    topology = other.topology
    if topology.tp == 1 and topology.pp > 1:
        layers = facts.pipeline_stage(topology.pp, other.timing.pipeline_stage).layers
        end = " and the output layer" if other.timing.pipeline_stage == topology.pp - 1 else ""
        return f"the slowest of its {topology.pp} stages has {layers} of {facts.layers} layers{end}"
    return f"tp {topology.tp} repeats what AutoTP leaves whole"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
