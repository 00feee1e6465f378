"""AutoTP inside pipeline stages (deepspeed 0.19.8).

AutoTP knows nothing of stages: it puts its own module in the place of the pipeline's mpu, with data-parallel groups
that run across all stages, and finds no tensor-parallel plan in a `PipelineModule`. Here,

- the plan is that of the model of transformers the layers are from (`hf_config`), by their Hugging Face names
  (`hf_names`). What lies outside of layers (embedding, head) stays whole;
- the pipeline's groups come back once AutoTP is done, with AutoTP's tensor-parallel ones beside them.

Can go when DeepSpeed's AutoTP asks the mpu it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.tensor_parallel import config as host
from deepspeed.utils import groups as host_groups
from torch import nn

from ds_etp.checkpoint.names import HubNames
from ds_etp.config.tp_plan import module_pattern
from ds_etp.errors import ConfigError, config_error
from ds_etp.patches.base import swapped

# An empty plan would have AutoTP guess by the names of layers.
_NOTHING = {"no_layer_of_this_stage": "colwise"}
_TENSOR = (
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
)


def check_tp_plan(module: nn.Module, tp: int, has_own_plan: bool) -> None:
    """Refuses a pipeline of which it is not known how to split its dense layers.

    Args:
        module: a `PipelineModule`.
        tp: tensor-parallel size.
        has_own_plan: whether the config has a `tensor_parallel.partition_config`.

    Raises:
        ConfigError: names what is missing.
    """
    if not has_own_plan and not (getattr(module, "hf_config", None) and getattr(module, "hf_names", None)):
        raise config_error(
            "tensor_parallel.autotp_size",
            tp,
            "needs to know how the pipeline's dense layers are split",
            works="attributes hf_names and hf_config of the PipelineModule, or a tensor_parallel.partition_config",
        )


@contextmanager
def tp_plan_from_hf_names(module: Any) -> Iterator[None]:
    """While AutoTP partitions a pipeline's stage, shows it the plan and the config of the layers' own model."""
    plan = _local_plan(module)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _get_hf_tp_plan(model: Any) -> dict[str, str] | None:
            found: dict[str, str] | None = plan if model is module else original(model)
            return found

        return _get_hf_tp_plan

    config = getattr(module, "hf_config", None)
    lent = config is not None and not hasattr(module, "config")
    if lent:
        module.config = config  # AutoTP looks for the number of key and value heads
    try:
        with swapped(host, "_get_hf_tp_plan", make):
            yield
    finally:
        if lent:
            del module.config


def _local_plan(module: nn.Module) -> dict[str, str]:
    """The entries that are about modules of this stage's layers, each under its local path."""
    entries = getattr(getattr(module, "hf_config", None), "base_model_tp_plan", None) or {}
    layers = {module_pattern(pattern): style for pattern, style in entries.items() if "*" in pattern}
    hub_name = HubNames(module)
    plan = dict(_NOTHING)
    for path, _ in module.named_modules():
        style = next((style for pattern, style in layers.items() if pattern.fullmatch(hub_name(path))), None)
        if style is not None:
            plan[path] = style
    return plan


class PipelineTPMpu:
    """An mpu that answers for a pipeline's groups, and for AutoTP's tensor-parallel ones."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(host_groups if name in _TENSOR else self._grid, name)


def restore_pipeline_mpu(engine: Any, module: Any) -> None:
    """Puts the pipeline's groups back, once AutoTP has split a stage.

    Raises:
        ConfigError: AutoTP has replaced a tied layer, of which the pipeline keeps the old one.
    """
    engine.mpu = PipelineTPMpu(module.mpu())
    _flatten_checked_inputs(engine, module)
    if module.dynamic_shape:
        # DeepSpeed keeps the first batch's shape for what it sends in parts.
        engine._config.pipeline.update(pipe_partitioned=False, grad_partitioned=False)
    for name, place in module.fwd_map.items():
        module.forward_funcs[place] = getattr(module, name)
    for key, comm in module.tied_comms.items():
        if comm["module"] is not module.tied_modules[key]:
            raise ConfigError(f"tensor_parallel.partition_config must leave the tied layer {key!r} whole.")


def _flatten_checked_inputs(engine: Any, module: Any) -> None:
    """AutoTP compares a first batch between tensor-parallel ranks, and stumbles over tuples of tensors."""
    hooks, handle = module._forward_pre_hooks, engine.first_dataloader_check
    original = hooks[handle.id]

    def flat(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = args[0] if args and isinstance(args[0], tuple) else args
        original(module, tuple(tensor.detach() for tensor in inputs), kwargs)

    hooks[handle.id] = flat
