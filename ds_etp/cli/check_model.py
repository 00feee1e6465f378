"""`ds-etp check --model`: experts layouts, dispatchers, tp_plan and sizes of a model built on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from torch import nn

from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.config.deepspeed import half_dtype, zero_stage
from ds_etp.config.dense_rules import check_stages
from ds_etp.dispatch.cost import DispatchChoice, tokens_are_replicated
from ds_etp.errors import config_error
from ds_etp.experts.build import misaligned_shards
from ds_etp.experts.checks import checked_layouts, choose_dispatchers
from ds_etp.experts.layout import ExpertsLayout
from ds_etp.parallel.topology import Topology
from ds_etp.patches.deepspeed.autotp import DensePlan, dense_plan
from ds_etp.patches.signatures import check_signatures
from ds_etp.patches.transformers.experts_flags import experts_implementation, is_decorated
from ds_etp.patches.transformers.experts_interface import PER_TOKEN_NAMES
from ds_etp.patches.transformers.meta_models import build_on_meta, read_config
from ds_etp.patches.versions import check_host_versions, check_sequence_version


@dataclass(frozen=True)
class ExpertsGroup:
    """Experts modules that are alike.

    Attributes:
        paths: of the modules, in the model's order.
        class_name: of the modules.
        implementation: transformers' experts implementation; "own" where the class doesn't take part in that choice.
        layout: of each module.
        top_k: K, as the config has it; "-" where no known name holds it.
        local_experts: experts that one rank holds of each module.
    """

    paths: tuple[str, ...]
    class_name: str
    implementation: str
    layout: ExpertsLayout
    top_k: str
    local_experts: int


@dataclass(frozen=True)
class Inspection:
    """What a job would do with a model.

    Attributes:
        model_class: the class that was built.
        dtype: what the model computes in, such as `bfloat16`.
        groups: experts modules, like ones together.
        expert_parameters: of the whole model; those that modules share count once.
        other_parameters: all others of the whole model.
        local_parameters: expert parameters on one rank, before ZeRO partitions them.
        itemsize: bytes of one weight.
        zero_stage: of ZeRO, 0 to 3.
        dense: what AutoTP is shown; None where attention isn't split, or by a partition_config of the config's own.
        choices: the dispatcher of each experts module.
        notes: what else there is to know, a sentence each.
    """

    model_class: str
    dtype: str
    groups: tuple[ExpertsGroup, ...]
    expert_parameters: int
    other_parameters: int
    local_parameters: int
    itemsize: int
    zero_stage: int
    dense: DensePlan | None
    choices: tuple[DispatchChoice, ...]
    notes: tuple[str, ...]


def inspect(
    source: str,
    topology: Topology,
    block: ExpertTensorParallelConfig,
    ds_config: Mapping[str, Any],
    *,
    ranks_per_node: int | None = None,
    trust_remote_code: bool = False,
    implementation: str | None = None,
) -> Inspection:
    """Builds a model without memory, and checks it as an engine does.

    Args:
        source: a folder with a config.json, that file, or an id on the Hugging Face hub.
        topology: what the config comes to; its own checks have passed.
        block: the config block.
        ds_config: the raw DeepSpeed config.
        ranks_per_node: None where the job is one node.
        trust_remote_code: whether code that comes with the model may run.
        implementation: the experts implementation the model is loaded with; None: transformers' choice.

    Raises:
        ConfigError: the one an engine would raise, or why there is no model.
    """
    stage = zero_stage(ds_config)
    check_signatures()
    check_host_versions(stage, topology.tp)
    config = read_config(source, trust_remote_code=trust_remote_code)
    model = build_on_meta(config, source, trust_remote_code=trust_remote_code, implementation=implementation)
    check_sequence_version(topology.cp)
    check_stages(topology, getattr(config.get_text_config(), "num_hidden_layers", topology.pp))
    half = half_dtype(ds_config)
    layouts = checked_layouts(model, topology, ds_config)
    first = next(model.get_submodule(next(iter(layouts))).parameters())
    total, whole, local = _count(model, layouts, topology)
    dense = _dense(model, layouts, topology, ds_config)
    return Inspection(
        model_class=type(model).__name__,
        dtype=half or str(first.dtype).removeprefix("torch."),
        groups=tuple(_groups(model, layouts, topology)),
        expert_parameters=whole,
        other_parameters=total - whole,
        local_parameters=local,
        itemsize=2 if half else first.element_size(),
        zero_stage=stage,
        dense=dense,
        choices=tuple(choose_dispatchers(model, layouts, topology, block, ranks_per_node).values()),
        notes=(
            *_notes(model, layouts, topology, dense),
            *filter(None, [misaligned_shards(model, layouts, topology, 2 if half else None)[1]]),
        ),
    )


def check_dense_plan(inspection: Inspection, topology: Topology) -> None:
    """Refuses a model whose attention AutoTP won't split, which DeepSpeed says only once a job runs.

    Raises:
        ConfigError: names the styles and what works.
    """
    if inspection.dense is not None and inspection.dense.refused:
        raise config_error(
            "tensor_parallel.autotp_size",
            topology.tp,
            f"cannot split the dense layers of {inspection.model_class}: AutoTP refuses the styles "
            f"{', '.join(inspection.dense.refused)} of its tp_plan, and with them all of it",
            works="1, or a tensor_parallel.partition_config",
        )


def _count(model: nn.Module, layouts: Mapping[str, ExpertsLayout], topology: Topology) -> tuple[int, int, int]:
    """Parameters of the model, of its experts, and of its experts on one rank."""
    local = {
        id(parameter): (parameter.numel(), prod(layout.parameters[name].local_shape(topology)))
        for path, layout in layouts.items()
        for name, parameter in model.get_submodule(path).named_parameters()
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    return total, sum(whole for whole, _ in local.values()), sum(part for _, part in local.values())


def _groups(model: Any, layouts: Mapping[str, ExpertsLayout], topology: Topology) -> Iterator[ExpertsGroup]:
    alike: dict[tuple[Any, ...], list[str]] = {}
    for path, layout in layouts.items():
        module = model.get_submodule(path)
        config = getattr(module, "config", None)
        # Where a class isn't decorated the config may have a choice all the same, and it is without effect.
        kernel = experts_implementation(module) or "eager" if is_decorated(module) else "own"
        top_k = _top_k(config) or _top_k(model.config.get_text_config()) or _top_k(model.config) or "-"
        shapes = tuple((name, parameter) for name, parameter in layout.parameters.items())
        key = (re.sub(r"\.\d+\.", ".*.", path, count=1), type(module).__name__, kernel, top_k, shapes)
        alike.setdefault(key, []).append(path)
    for (_, class_name, kernel, top_k, _), paths in alike.items():
        layout = layouts[paths[0]]
        yield ExpertsGroup(tuple(paths), class_name, kernel, layout, top_k, layout.num_experts // topology.ep)


def _top_k(config: Any) -> str:
    values = (getattr(config, name, None) for name in PER_TOKEN_NAMES)
    return next((str(value) for value in values if value is not None), "")


def _dense(model: Any, layouts: Iterable[str], topology: Topology, ds_config: Mapping[str, Any]) -> DensePlan | None:
    settings = ds_config.get("tensor_parallel") or {}
    if topology.tp == 1 or settings.get("partition_config") or settings.get("preset_model"):
        return None
    return dense_plan(model, layouts)


def _notes(model: Any, layouts: Iterable[str], topology: Topology, dense: DensePlan | None) -> Iterator[str]:
    quantization = getattr(model.config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        yield (
            f"The model's config asks for quantized weights ({method}): checked here without. ds_etp splits plain "
            "weights only; load it dequantized."
        )
    if topology.tp == 1:
        yield "Attention is not split (tp 1)."
    elif dense is None:
        yield "Dense layers are split by the config's own tensor_parallel.partition_config or preset_model."
    elif not dense.entries:
        yield "The model has no tp_plan: AutoTP splits its dense layers by rules of its own."
    if topology.pp > 1:
        yield (
            f"Of all {topology.pp} pipeline stages together: a stage holds the layers that PipelineModule gives it. "
            "See each stage's memory: ds-etp plan --pp."
        )
    if topology.cp > 1:
        yield f"Sequences have to be as long as a multiple of cp {topology.cp}."
        if getattr(model.config.get_text_config(), "head_dim", 0) is None:
            yield "Set config.head_dim to a number before Ulysses is registered: it is None, which Ulysses can't read."
    owners = [id(parameter) for path in layouts for parameter in model.get_submodule(path).parameters()]
    if len(set(owners)) < len(owners):
        yield "Some experts modules share their weights: the totals count them once."
    if not tokens_are_replicated(topology):
        yield "Expert ranks hold different batches: all must run the same number of forward passes, in evaluation too."


def path_pattern(paths: Iterable[str]) -> str:
    """One pattern for paths that differ in their first number: `model.layers.{3..60}.mlp.experts`."""
    listed = list(paths)
    found = [re.search(r"\.(\d+)\.", path) for path in listed]
    if len(listed) == 1 or not all(found):
        return ", ".join(listed)
    numbers = [int(match[1]) for match in found if match]
    head, tail = listed[0][: found[0].start(1)], listed[0][found[0].end(1) :]  # type: ignore[union-attr]
    return f"{head}{{{_ranges(numbers)}}}{tail}"


def _ranges(numbers: list[int]) -> str:
    """`3..60`, `1,3..23` for every second one, or the runs one by one."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) == 1 and len(numbers) > 2:
        step = steps.pop()
        return f"{numbers[0]}..{numbers[-1]}" if step == 1 else f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
