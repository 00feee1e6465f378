"""Every layout that works, ranked: those that fit first, the fastest of them first."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ds_etp.config.dense_rules import check_axes, check_sequence_heads, check_stages
from ds_etp.config.grouped_mm import keeps_alignment
from ds_etp.dispatch.cost import DispatchChoice, choose_dispatcher
from ds_etp.errors import ConfigError
from ds_etp.parallel.topology import Topology
from ds_etp.planner.hardware import Hardware
from ds_etp.planner.job import BUCKET, Job
from ds_etp.planner.memory import Memory, memory_of
from ds_etp.planner.model import ModelFacts
from ds_etp.planner.timing import Timing, timing_of

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Proposal:
    """One layout, and what it costs.

    Attributes:
        topology, job, choice: the sizes, what is trained, and the dispatcher.
        memory, timing: of one rank, and of one step.
        fits: whether the peak is within what a rank can fill.
        aligned: whether `experts_implementation="grouped_mm"` takes the shards, if it takes the whole experts.
    """

    topology: Topology
    job: Job
    choice: DispatchChoice
    memory: Memory
    timing: Timing
    fits: bool
    aligned: bool

    @property
    def sizes(self) -> str:
        """The sizes and the ZeRO stage, in a few words; cp and pp only where they are above 1."""
        topology = self.topology
        others = "".join(f"{axis} {size}, " for axis, size in self.script_axes.items())
        return f"tp {topology.tp}, {others}etp {topology.etp}, ep {topology.ep}, ZeRO-{self.job.zero_stage}"

    @property
    def script_axes(self) -> dict[str, int]:
        """cp and pp where they are above 1: no config file holds them, the training script sets them up."""
        sizes = {"cp": self.topology.cp, "pp": self.topology.pp}
        return {axis: size for axis, size in sizes.items() if size > 1}


def rank_layouts(
    facts: ModelFacts,
    hardware: Hardware,
    *,
    sequence: int,
    micro_batch: int = 1,
    zero_stages: Sequence[int] = ZERO_STAGES,
    recompute: bool = True,
    micro_batches: int = 1,
    cp: Container[int] = (1,),
    pp: Container[int] = (1,),
) -> list[Proposal]:
    """All layouts that `ds-etp check` and the model's layers take, best first.

    Args:
        facts, hardware: what is split, and over what.
        sequence, micro_batch, recompute, micro_batches: see `Job`.
        zero_stages: those to consider.
        cp, pp: which of those sizes to consider.

    Raises:
        ConfigError: there is no layout at all.
    """
    proposals = [
        _proposal(
            facts,
            hardware,
            topology,
            choice,
            Job(sequence, micro_batch, zero_stage, recompute, micro_batches=micro_batches),
        )
        for topology in topologies(facts, hardware, cp=cp, pp=pp)
        if sequence % topology.cp == 0
        for choice in [_choice(facts, hardware, topology)]
        for zero_stage in zero_stages
        if passes(check_axes, topology, zero_stage)
    ]
    if not proposals:
        raise ConfigError(
            f"No layout of {facts.name} works on {hardware.gpus} GPUs with sequences of {sequence:,} tokens, ZeRO "
            f"{', '.join(map(str, zero_stages))}, and the sizes asked for."
        )
    return sorted(proposals, key=_order)


def passes(check: Callable[..., object], *arguments: object) -> bool:
    """Whether a check refuses nothing."""
    try:
        check(*arguments)
    except ConfigError:
        return False
    return True


def topologies(facts: ModelFacts, hardware: Hardware, *, cp: Container[int], pp: Container[int]) -> Iterator[Topology]:
    """Sizes that divide what they split. Tensor parallel groups stay within a node: they talk in every layer."""
    for pp_size in _divisors(hardware.gpus):
        if pp_size not in pp or not _takes_pp(facts, pp_size):
            continue
        ranks = hardware.gpus // pp_size
        for tp in _divisors(ranks):
            if tp > hardware.per_node or hardware.per_node % tp or not facts.takes_tp(tp):
                continue
            for cp_size in _divisors(ranks // tp):
                if cp_size in cp and _takes_cp(facts, Topology(ranks, tp=tp, cp=cp_size)):
                    yield from _with_experts(facts, Topology(hardware.gpus, tp=tp, cp=cp_size, pp=pp_size))


def _takes_pp(facts: ModelFacts, pp_size: int) -> bool:
    if pp_size == 1:
        return True
    return not facts.no_pp and passes(check_stages, Topology(pp_size, pp=pp_size), facts.layers)


def _takes_cp(facts: ModelFacts, dense: Topology) -> bool:
    if dense.cp == 1:
        return True
    return not facts.no_cp and passes(check_sequence_heads, dense, facts.heads, facts.key_value_heads)


def _with_experts(facts: ModelFacts, dense: Topology) -> Iterator[Topology]:
    ranks = dense.world // dense.pp
    for ep in _divisors(ranks):
        if facts.experts % ep or facts.spare_experts % ep:
            continue
        for etp in _divisors(ranks // ep):
            if facts.columns % etp == 0:
                yield replace(dense, etp=etp, ep=ep)


def ds_config(proposal: Proposal) -> dict[str, Any]:
    """The DeepSpeed config of a layout. What it can't hold is in `script_notes`."""
    topology, job = proposal.topology, proposal.job
    zero: dict[str, Any] = {"stage": job.zero_stage}
    if job.zero_stage:
        zero["reduce_bucket_size"] = BUCKET
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.micro_batches,
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
        "dispatcher": proposal.choice.dispatcher,
    }
    return config


def script_notes(proposal: Proposal) -> list[str]:
    """What the training script has to do for a layout: cp and pp have no key in DeepSpeed's config."""
    topology, job = proposal.topology, proposal.job
    notes = []
    if topology.cp > 1:
        notes.append(
            f"cp {topology.cp} is set up by the script, once model.config.head_dim is a number: mpu = "
            'UlyssesSPAttentionHF.register_with_transformers(model, core_attn_implementation="sdpa", '
            f"sequence_parallel_size={topology.cp}, micro_batch_size={job.micro_batch}), then "
            "deepspeed.initialize(..., mpu=mpu). With Trainer: "
            f'ParallelismConfig(sp_size={topology.cp}, sp_backend="deepspeed").'
        )
    if topology.pp > 1:
        interval = ", activation_checkpoint_interval=1" if job.recompute else ""
        stages = f"num_stages={topology.pp}"
        if topology.tp > 1:
            sizes = f"num_pp={topology.pp}, num_mp={topology.tp}, num_dp={topology.dp}"
            stages = f"topology=PipeModelDataParallelTopology({sizes})"
        notes.append(
            f"pp {topology.pp} is set up by the script: deepspeed.initialize(model=ds_etp.pipeline.from_causal_lm("
            f'model, {stages}, partition_method="parameters"{interval})), trained by engine.train_batch. '
            f"gradient_accumulation_steps, {job.micro_batches}, is its number of micro batches."
        )
    return notes


def _choice(facts: ModelFacts, hardware: Hardware, topology: Topology) -> DispatchChoice:
    return choose_dispatcher(
        topology,
        per_token=facts.per_token,
        experts=facts.experts,
        ranks_per_node=hardware.per_node if hardware.gpus > hardware.per_node else None,
        inter_node_cost=max(1.0, hardware.intra / hardware.inter),
    )


def _proposal(facts: ModelFacts, hardware: Hardware, topology: Topology, choice: DispatchChoice, job: Job) -> Proposal:
    memory = memory_of(facts, topology, job)
    return Proposal(
        topology=topology,
        job=job,
        choice=choice,
        memory=memory,
        timing=timing_of(facts, topology, job, hardware, choice.comm_volume),
        fits=memory.peak <= hardware.memory * hardware.usable,
        aligned=keeps_alignment(facts.columns, topology.etp, job.itemsize),
    )


def _order(proposal: Proposal) -> tuple[Any, ...]:
    speed = -proposal.timing.rate
    # Of layouts that don't fit the one that misses by least helps most.
    wanted = speed if proposal.fits else proposal.memory.peak
    return not proposal.fits, not proposal.aligned, wanted, proposal.memory.peak, proposal.job.zero_stage


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)
