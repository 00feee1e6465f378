"""Pipeline stages: what DeepSpeed's `PipelineModule` (0.19.8) is laid out like, and what its ranks check together.

A stage holds some of the layers, and may hold no experts. Whatever is collective over the world is done by every
stage alike, and what one stage refuses is raised on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as host_groups
from torch import nn

from ds_etp.checkpoint.agree import everyone
from ds_etp.errors import CheckpointError, ConfigError, config_error
from ds_etp.layouts import ExpertsLayout
from ds_etp.loading.unread import unread_modules
from ds_etp.patches.versions import check_pipeline_version
from ds_etp.topology import Topology
from ds_etp.wire import Choice


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
    grid = engine.mpu.topology()
    world, pp = dist.get_world_size(), int(grid.get_dim("pipe"))
    per_stage = world // pp
    places = [grid.get_coord(rank) for rank in range(world)]
    if [(place.pipe, place.data) for place in places] != [divmod(rank, per_stage) for rank in range(world)]:
        raise config_error(
            "PipelineModule.topology",
            type(grid).__name__,
            f"does not lay ranks out as experts are: each of {pp} stages has to hold {per_stage} ranks in a row, all "
            "of them data-parallel",
            works="PipeDataParallelTopology, or num_stages alone",
        )
    return pp


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
    stage, tp, sequence = int(engine.zero_optimization_stage()), int(engine.autotp_size()), _sequence_ranks(engine)
    kind = type(engine).__name__
    for refused, key, value, rule, works in (
        (kind != "PipelineEngine", "PipelineModule", kind, "was not tried with split experts", "a PipelineModule"),
        (
            stage > 1,
            "zero_optimization.stage",
            stage,
            "is incompatible with PipelineModule, in DeepSpeed itself",
            "0, 1",
        ),
        (
            tp > 1,
            "tensor_parallel.autotp_size",
            tp,
            "does not work with PipelineModule: DeepSpeed's AutoTP puts groups of its own, which know no stages, in "
            "the place of the pipeline's",
            "1, or a model without pipeline",
        ),
        (
            sequence > 1,
            "sequence parallel size",
            sequence,
            "does not work with PipelineModule, which has no groups for it",
            "1",
        ),
        (engine.fp16_enabled(), "fp16.enabled", True, "was not tried with PipelineModule", "bf16, or neither"),
    ):
        if refused:
            raise config_error(key, value, rule, works=works)


def _sequence_ranks(engine: Any) -> int:
    """As the config has it, or as Ulysses' groups are at the moment."""
    group = parallel_state_sp._SEQUENCE_PARALLEL_GROUP
    named = engine._config._param_dict.get("sequence_parallel_size", 1)
    return max(int(named), dist.get_world_size(group) if group is not None else 1)


def checked_stages(module: Any, check: Callable[[], Mapping[str, ExpertsLayout]]) -> dict[str, ExpertsLayout]:
    """A stage's layouts, once every stage's are known to fit. Collective over the world.

    Args:
        module: the `PipelineModule`.
        check: gives this rank's layouts, without collectives.

    Raises:
        ConfigError: on every rank alike, what the first rank that refuses says; or no stage has experts.
    """
    layouts: Mapping[str, ExpertsLayout] = {}
    failure: Exception | None = None
    try:
        layouts = check()
        _check_stage(module, layouts)
    except Exception as error:
        failure = error
    answers = everyone((len(layouts), None if failure is None else str(failure)))
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


def _check_stage(module: nn.Module, layouts: Mapping[str, ExpertsLayout]) -> None:
    for path in layouts:
        if path.startswith("tied_modules."):
            raise config_error(
                "TiedLayerSpec",
                path.split(".")[1],
                "holds experts, which cannot be tied",
                where=path,
                works="LayerSpec",
            )
    for path in unread_modules(module):
        raise config_error(
            "PipelineModule",
            type(module).__name__,
            "has layers of ds_etp.from_pretrained, whose experts are not read",
            where=path,
            works="layers of a model that transformers' own from_pretrained has loaded",
        )


def gathered_choices(choices: list[Choice], topology: Topology) -> list[Choice]:
    """The plans of every stage's experts modules, in order. Collective over the world."""
    firsts = topology.group_of("pp", 0)
    answers = everyone(choices if dist.get_rank() in firsts else [])
    return [choice for rank in firsts for choice in answers[rank]]


def forget_grid(engine: Any) -> None:
    """DeepSpeed keeps a pipeline's grid for the engines to come, which would take its groups for theirs."""
    if host_groups.mpu is engine.mpu:
        host_groups.mpu = None
