"""PEFT's own merge (0.18 to 0.21) on whole tensors of one layer, while the engine's parameters stay split.

PEFT merges into the parameters that a layer holds, which here are shards, or nothing at ZeRO-3. So for the time of
one layer's merge its parameters are given whole tensors, and afterwards what they had. Whatever kind of adapter it is,
PEFT does the arithmetic. Can go when PEFT merges into tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_etp.errors import config_error
from ds_etp.patches.peft.expert_lora import plain_path


@dataclass(frozen=True)
class MergeStep:
    """Parameters that come out of a model together.

    Attributes:
        outputs: from a parameter's name in the model to the name it comes out under.
        adapters: the further parameters that it takes, by name.
        wrappers: the layers of PEFT that merge adapters into them, the innermost first.
        parameters: the parameters of both kinds, by name.
    """

    outputs: dict[str, str]
    adapters: tuple[str, ...] = ()
    wrappers: tuple[Any, ...] = ()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def merge_steps(model: Any) -> list[MergeStep]:
    """How the parameters of a model's base come about, in their order. Without collectives.

    Args:
        model: a PeftModel; its parameters may be split and partitioned.

    Raises:
        ConfigError: it has a kind of adapter that isn't merged layer by layer.
    """
    parameters = dict(model.named_parameters())
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    wrappers = _wrappers(model)
    adapters, left_out = _adapters(wrappers, name_of), _left_out(model)
    targets = {path: _targets(wrapper, name_of) for path, wrapper in wrappers.items()}
    base = model.get_base_model()
    prefix = next(f"{path}." for path, module in model.named_modules() if module is base)
    steps: list[MergeStep] = []
    done: set[str] = set()
    for name in parameters:
        taken = name in done or any(name in own for own in adapters.values())
        if taken or not name.startswith(prefix) or name.startswith(left_out):
            continue
        paths = [path for path in reversed(wrappers) if name in targets[path] and adapters[path]]
        together = dict.fromkeys([name, *(target for path in paths for target in targets[path])])
        done.update(together)
        outputs = {source: plain_path(source.removeprefix(prefix)) for source in together}
        inputs = tuple(adapter for path in paths for adapter in adapters[path])
        used = {source: parameters[source] for source in (*outputs, *inputs)}
        steps.append(MergeStep(outputs, inputs, tuple(wrappers[path] for path in paths), used))
    return steps


def _wrappers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by path."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {path: module for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _adapters(wrappers: Mapping[str, Any], name_of: Mapping[int, str]) -> dict[str, list[str]]:
    """The parameters that PEFT added to each layer."""
    return {
        path: [
            name_of[id(parameter)]
            for name, parameter in wrapper.named_parameters()
            if not name.startswith("base_layer.")
        ]
        for path, wrapper in wrappers.items()
    }


def _targets(wrapper: Any, name_of: Mapping[int, str]) -> list[str]:
    """The parameters that a layer's merge changes."""
    inner = wrapper.get_base_layer()
    name = getattr(wrapper, "parameter_name", None)
    own = inner.parameters() if name is None else [inner.get_parameter(name)]
    return [name_of[id(parameter)] for parameter in own]


def _left_out(model: nn.Module) -> tuple[str, ...]:
    """The beginnings of names that aren't in use: of modules trained beside the original, all but one copy."""
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    beginnings: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters[0] if module.active_adapters and not module.disable_adapters else None
            if active is not None:
                beginnings.append(f"{path}.original_module.")
            beginnings += [f"{path}.modules_to_save.{name}." for name in module.modules_to_save if name != active]
        elif isinstance(module, AuxiliaryTrainingWrapper):
            raise config_error(
                "merge_adapters", True, f"cannot merge {type(module).__name__}", where=path, works="False"
            )
    return tuple(beginnings)


def merge(step: MergeStep, tensors: Mapping[str, Tensor | None]) -> None:
    """Merges the active adapters of a step's layers into its whole tensors, in place. Without collectives.

    Args:
        step: which layers.
        tensors: whole tensors by name, of everything that the step takes.
    """
    held = {name: parameter.data for name, parameter in step.parameters.items()}
    merged = [list(wrapper.merged_adapters) for wrapper in step.wrappers]
    classes = [type(wrapper) for wrapper in step.wrappers]
    try:
        for name, parameter in step.parameters.items():
            tensor = tensors[name]
            assert tensor is not None
            parameter.data = tensor
        with torch.no_grad():
            for wrapper, kind in zip(step.wrappers, classes, strict=True):
                # Around split experts, the class that makes no more than a shard's part of the product.
                wrapper.__class__ = getattr(kind, "ds_etp_wrapped_class", kind)
                if set(wrapper.active_adapters) - set(wrapper.merged_adapters):
                    wrapper.merge()
        for name in step.outputs:
            result, tensor = step.parameters[name].data, tensors[name]
            if tensor is not None and result.data_ptr() != tensor.data_ptr():
                tensor.copy_(result)
    finally:
        for wrapper, kind, before in zip(step.wrappers, classes, merged, strict=True):
            wrapper.__class__ = kind
            wrapper.merged_adapters[:] = before
        for name, parameter in step.parameters.items():
            parameter.data = held[name]
