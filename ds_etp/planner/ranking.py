"""Every layout that works, ranked: those that fit first, the fastest of them first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ds_etp.errors import ConfigError
from ds_etp.planner.hardware import Hardware
from ds_etp.planner.memory import BUCKET, Job, Memory, memory_of
from ds_etp.planner.model import ModelFacts
from ds_etp.planner.timing import Timing, timing_of
from ds_etp.topology import Topology
from ds_etp.wire import Choice, choose_plan

STAGES = (0, 1, 2, 3)
# A row of an expert's weights has to be a multiple of so many bytes for torch's grouped matrix product.
_GROUPED_MM_ALIGNMENT = 16


@dataclass(frozen=True)
class Proposal:
    """One layout, and what it costs.

    Attributes:
        topology, job, choice: the sizes, what is trained, and the plan that brings tokens to experts.
        memory, timing: of one rank, and of one step.
        fits: whether the peak is within what a rank can fill.
        aligned: whether `experts_implementation="grouped_mm"` takes the shards, if it takes the whole experts.
    """

    topology: Topology
    job: Job
    choice: Choice
    memory: Memory
    timing: Timing
    fits: bool
    aligned: bool

    @property
    def sizes(self) -> str:
        """tp, etp, ep and the ZeRO stage, in a few words."""
        topology = self.topology
        return f"tp {topology.tp}, etp {topology.etp}, ep {topology.ep}, ZeRO-{self.job.stage}"


def rank_layouts(
    facts: ModelFacts,
    hardware: Hardware,
    *,
    sequence: int,
    micro_batch: int = 1,
    stages: Sequence[int] = STAGES,
    recompute: bool = True,
) -> list[Proposal]:
    """All layouts that `ds-etp check` and the model's layers take, best first.

    Args:
        facts, hardware: what is split, and over what.
        sequence, micro_batch, recompute: see `Job`.
        stages: ZeRO stages to consider.

    Raises:
        ConfigError: there is no layout at all.
    """
    proposals = [
        _proposal(facts, hardware, topology, choice, Job(sequence, micro_batch, stage, recompute))
        for topology in topologies(facts, hardware)
        for choice in [_choice(facts, hardware, topology)]
        for stage in stages
    ]
    if not proposals:
        raise ConfigError(f"No layout of {facts.name} works on {hardware.gpus} GPUs.")
    return sorted(proposals, key=_order)


def topologies(facts: ModelFacts, hardware: Hardware) -> Iterator[Topology]:
    """Sizes that divide what they split. Tensor parallel groups stay within a node: they talk in every layer."""
    gpus = hardware.gpus
    for tp in _divisors(gpus):
        if tp > hardware.per_node or hardware.per_node % tp or not facts.takes_tp(tp):
            continue
        for ep in _divisors(gpus):
            if facts.experts % ep or facts.spare_experts % ep:
                continue
            for etp in _divisors(gpus // ep):
                if facts.columns % etp == 0:
                    yield Topology(gpus, tp=tp, etp=etp, ep=ep)


def ds_config(proposal: Proposal) -> dict[str, Any]:
    """The DeepSpeed config of a layout."""
    topology, job = proposal.topology, proposal.job
    zero: dict[str, Any] = {"stage": job.stage}
    if job.stage:
        zero["reduce_bucket_size"] = BUCKET
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
    if topology.tp > 1:
        config["tensor_parallel"] = {"autotp_size": topology.tp}
    config["expert_tensor_parallel"] = {
        "etp_size": topology.etp,
        "ep_size": topology.ep,
        "plan": proposal.choice.plan,
    }
    return config


def _choice(facts: ModelFacts, hardware: Hardware, topology: Topology) -> Choice:
    return choose_plan(
        topology,
        per_token=facts.per_token,
        experts=facts.experts,
        ranks_per_node=hardware.per_node if hardware.gpus > hardware.per_node else None,
        node_weight=max(1.0, hardware.intra / hardware.inter),
    )


def _proposal(facts: ModelFacts, hardware: Hardware, topology: Topology, choice: Choice, job: Job) -> Proposal:
    memory = memory_of(facts, topology, job)
    return Proposal(
        topology=topology,
        job=job,
        choice=choice,
        memory=memory,
        timing=timing_of(facts, topology, job, hardware, choice.traffic),
        fits=memory.peak <= hardware.memory * hardware.usable,
        aligned=_aligned(facts.columns // topology.etp, job) or not _aligned(facts.columns, job),
    )


def _aligned(columns: int, job: Job) -> bool:
    return columns * job.itemsize % _GROUPED_MM_ALIGNMENT == 0


def _order(proposal: Proposal) -> tuple[Any, ...]:
    speed = -proposal.timing.rate
    # Of layouts that don't fit the one that misses by least helps most.
    wanted = speed if proposal.fits else proposal.memory.peak
    return not proposal.fits, not proposal.aligned, wanted, proposal.memory.peak, proposal.job.stage


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
