"""Pipeline stages: what DeepSpeed's `PipelineModule` (0.19.8) is laid out like, and what its ranks check together.

A stage holds some of the layers, and may hold no experts. Whatever is collective over the world is done by every
stage alike, and what one stage refuses is raised on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as host_groups
from torch import nn

from ds_etp.config.deepspeed import half_dtype
from ds_etp.config.dense_rules import check_pipeline
from ds_etp.dispatch.cost import DispatchChoice
from ds_etp.errors import CheckpointError, ConfigError, config_error
from ds_etp.experts.layout import ExpertsLayout
from ds_etp.loading.deferred import deferred_modules
from ds_etp.parallel.consensus import all_gather_object
from ds_etp.parallel.topology import Topology
from ds_etp.patches.deepspeed.engine import raw_config
from ds_etp.patches.deepspeed.pipeline_autotp import check_tp_plan
from ds_etp.patches.versions import check_pipeline_version


def stage_count(engine: Any) -> int:
    """pp: how many stages an engine's module has; 1 without pipeline.

    Before anything is made; the engine knows the grid that the module came with by the name `mpu`.

    Raises:
        ConfigError: the pipeline is of a kind that does not work with split experts.
    """
    if not engine.pipeline_parallelism:
        return 1
    check_pipeline_version()
    _check_options(engine)
    grid, tp = _grid(engine).topology(), max(int(engine.autotp_size()), 1)
    world, pp = dist.get_world_size(), int(grid.get_dim("pipe"))
    ours, rank = Topology(world, tp=tp, pp=pp), range(world)
    places = [grid.get_coord(r) for r in rank]
    wanted = [(ours.index_in("pp", r), ours.index_in("dp", r), ours.index_in("tp", r)) for r in rank]
    if [(place.pipe, place.data, getattr(place, "model", 0)) for place in places] != wanted:
        works = "PipeDataParallelTopology, or num_stages alone"
        raise config_error(
            "PipelineModule.topology",
            type(grid).__name__,
            f"does not lay ranks out as experts are: each of {pp} stages has to hold {world // pp} ranks in a row, and "
            f"in it {tp} tensor-parallel ones (tensor_parallel.autotp_size) in a row",
            works=works if tp == 1 else f"PipeModelDataParallelTopology(num_pp={pp}, num_mp={tp}, num_dp={ours.dp})",
        )
    return pp


def _grid(engine: Any) -> Any:
    """Also before the engine has its module: then its mpu is the grid that the module came with."""
    module = vars(engine).get("module")
    return engine.mpu if module is None else module.mpu()


def topology_of(engine: Any) -> Topology:
    """How an engine's model is split, with the `expert_tensor_parallel` block or without.

    Raises:
        CheckpointError: it is a pipeline of a kind that ds_etp does not know.
    """
    # Not getattr: an engine passes unknown names on to its module.
    extension = vars(engine).get("ds_etp")
    if extension is not None:
        topology: Topology = extension.topology
        return topology
    try:
        stages = stage_count(engine)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return Topology(dist.get_world_size(), tp=max(engine.autotp_size(), 1), pp=stages)


def _check_options(engine: Any) -> None:
    stage, sequence = int(engine.zero_optimization_stage()), _sequence_ranks(engine)
    kind, (computed, accumulated) = type(engine).__name__, engine.get_data_types()
    for refused, key, value, rule, works in (
        (kind != "PipelineEngine", "PipelineModule", kind, "was not tried with split experts", "a PipelineModule"),
        (
            sequence > 1,
            "sequence parallel size",
            sequence,
            "does not work with PipelineModule, which has no groups for it",
            "1",
        ),
        (
            stage == 1 and engine.zero_cpu_offload() and computed != accumulated,
            "data_types.grad_accum_dtype",
            str(accumulated).removeprefix("torch."),
            "with offload_optimizer and PipelineModule: DeepSpeed does not sum such gradients of tied layers",
            "the type the model computes in, or no offload",
        ),
    ):
        if refused:
            raise config_error(key, value, rule, works=works)
    check_pipeline(stage, half_dtype(raw_config(engine)), "PipelineModule")


def _sequence_ranks(engine: Any) -> int:
    """As the config has it, or as Ulysses' groups are at the moment."""
    group = parallel_state_sp._SEQUENCE_PARALLEL_GROUP
    named = raw_config(engine).get("sequence_parallel_size", 1)
    return max(int(named), dist.get_world_size(group) if group is not None else 1)


def validate_stages(
    engine: Any, module: nn.Module, check: Callable[[], Mapping[str, ExpertsLayout]], tp: int
) -> dict[str, ExpertsLayout]:
    """A stage's layouts, once every stage's are known to fit. Collective over the world.

    Args:
        engine: a PipelineEngine in the making.
        module: its `PipelineModule`.
        check: gives this rank's layouts, without collectives.
        tp: tensor-parallel size.

    Raises:
        ConfigError: on every rank alike, what the first rank that refuses says; or no stage has experts.
    """
    layouts: Mapping[str, ExpertsLayout] = {}
    failure: Exception | None = None
    try:
        layouts = check()
        _check_stage(engine, module, layouts)
        if tp > 1:
            check_tp_plan(module, tp, raw_config(engine)["tensor_parallel"].get("partition_config") is not None)
    except Exception as error:
        failure = error
    if engine.local_rank >= 0:
        get_accelerator().set_device(engine.local_rank)  # before AutoTP the engine has not, and NCCL needs it
    answers = all_gather_object((len(layouts), None if failure is None else str(failure)))
    refused = next((said for _, said in answers if said is not None), None)
    if refused is not None:
        raise ConfigError(refused) from failure
    if not any(count for count, _ in answers):
        raise config_error(
            "expert_tensor_parallel.enabled",
            True,
            "found no routed experts in any stage of the PipelineModule",
            works="false, or layers of a mixture-of-experts model of transformers",
        )
    return dict(layouts)


def _check_stage(engine: Any, module: nn.Module, layouts: Mapping[str, ExpertsLayout]) -> None:
    for path in layouts:
        if path.startswith("tied_modules."):
            raise config_error(
                "TiedLayerSpec",
                path.split(".")[1],
                "holds experts, which cannot be tied",
                where=path,
                works="LayerSpec",
            )
    for path in deferred_modules(module):
        raise config_error(
            "PipelineModule",
            type(module).__name__,
            "has layers of ds_etp.from_pretrained, whose experts are not read",
            where=path,
            works="layers of a model that transformers' own from_pretrained has loaded",
        )
    trains = engine.client_optimizer is not None or engine.optimizer_name() is not None
    if trains and not any(parameter.requires_grad for parameter in module.parameters()):
        raise config_error(
            "PipelineModule",
            type(module).__name__,
            f"has no parameter that is trained in stage {_grid(engine).get_stage_id()}, and DeepSpeed makes no "
            "optimizer of none",
            works="a partition of layers with some in each stage",
        )


def gathered_choices(choices: list[DispatchChoice], topology: Topology) -> list[DispatchChoice]:
    """The plans of every stage's experts modules, in order. Collective over the world."""
    firsts = topology.group_of("pp", 0)
    answers = all_gather_object(choices if dist.get_rank() in firsts else [])
    return [choice for rank in firsts for choice in answers[rank]]


def clear_global_mpu(engine: Any) -> None:
    """DeepSpeed keeps a pipeline's grid for the engines to come, which would take its groups for theirs."""
    if engine.mpu is not None and host_groups.mpu is engine.mpu:
        host_groups.mpu = None
