"""Refuses the model's own save methods while its parameters are shards.

`save_pretrained`, PEFT's one too, `safetensors.torch.save_model` and a pipeline's `save_state_dict` would write this
rank's shards under the whole model's names. Refused, with the call that works. A state dict of whole tensors, as
Trainer and accelerate bring it, goes through. (transformers 5.0 to 5.24, PEFT 0.21, safetensors 0.4 to 0.7. What the
user writes himself, `torch.save(model.state_dict())` or `parameter.data`, nobody can see.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import safetensors.torch
from torch import nn
from transformers import PreTrainedModel

from ds_etp.errors import CheckpointError
from ds_etp.experts.layout import full_shape
from ds_etp.experts.sharded import sharded_modules
from ds_etp.patches.base import MethodPatch, override
from ds_etp.patches.peft.expert_lora import is_peft_model

_META = "ds_autotp_universal_checkpoint_meta"


def refuse_shard_saves(model: Any) -> None:
    """Makes an engine's module raise `CheckpointError` where a call would write shards.

    Around a model of transformers PEFT has a `save_pretrained` of its own. The inner one comes out by itself when
    adapters are merged and unloaded.
    """
    parts = [model, model.get_base_model()] if is_peft_model(model) else [model]
    for part in parts:
        if is_peft_model(part) or isinstance(part, PreTrainedModel):
            override(part, "save_pretrained", functools.partial(_checked, part))
    # Stays when ds_etp is unregistered, since the model stays split; it does nothing for others.
    MethodPatch(safetensors.torch, "save_model", _checked_save_model).apply()


def _checked(model: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state_dict")
        if state is None and not is_peft_model(model) and len(args) > 1:
            state = args[1]
        found = _in_shards(model) if state is None else _shard_among(model, state)
        if found is not None:
            raise CheckpointError(
                f"save_pretrained({str(save_directory)!r}) of the model would write {found}. "
                "Call ds_etp.save_pretrained(engine, folder) on every rank instead."
            )
        return original(save_directory, *args, **kwargs)

    return save_pretrained


def _checked_save_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_model(model: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, nn.Module) and next(sharded_modules(model), None) is not None:
            found = _shard_among(model, model.state_dict(), everything=True)
            if found is not None:
                raise CheckpointError(
                    f"save_model(model, {str(filename)!r}) would write {found}. "
                    "Call ds_etp.save_pretrained(engine, folder) on every rank instead."
                )
        return original(model, filename, *args, **kwargs)

    return save_model


def refuse_stage_files(module: Any) -> None:
    """Makes a `PipelineModule`'s own reading and writing of layers raise `CheckpointError`.

    Its `save_state_dict` would write this rank's shards as if they were whole.
    """

    def make(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> NoReturn:
            raise CheckpointError(
                f"PipelineModule.{name} knows nothing of split experts. Call engine.save_checkpoint, "
                "engine.load_checkpoint or ds_etp.save_pretrained(engine, folder) on every rank instead."
            )

        return refused

    for name in ("save_state_dict", "load_state_dir"):
        override(module, name, lambda _, name=name: make(name))  # type: ignore[misc]


def _in_shards(model: nn.Module) -> str | None:
    """What `save_pretrained` would write wrong by itself; None where it is right."""
    if not is_peft_model(model):
        return _shard_among(model, model.state_dict())
    for name, parameter in model.named_parameters():
        cut = hasattr(parameter, "ds_id") or getattr(parameter, "tensor_model_parallel", False)
        if parameter.requires_grad and cut:
            return f"this rank's part of {name}"
    return None


def _shard_among(model: nn.Module, state: Mapping[str, Any], *, everything: bool = False) -> str | None:
    """The first tensor of a state dict that isn't the whole parameter of its name; None where there is none.

    Args:
        model: whose state it is.
        state: by name; what isn't a parameter's is let through.
        everything: whether all of it is written. Of a PeftModel, otherwise, only what PEFT added to the base model is.
    """
    added = not everything and is_peft_model(model)
    for name, shape in _whole_shapes(model):
        if name not in state or (added and not _is_adapter(model, name)):
            continue
        given = tuple(getattr(state[name], "shape", shape))
        if given != shape:
            return f"shards under the whole model's names: {name} would be {given}, not {shape}"
    return None


def _whole_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter's unsharded shape, under each of its names."""
    experts = {
        id(parameter): module.ds_etp_shard.layout.parameters[name].shape
        for _, module in sharded_modules(model)
        for name, parameter in module.named_parameters()
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        meta = getattr(parameter, _META, None) or {}
        split = None if meta.get("replicated") else meta.get("logical_shape") or meta.get("original_shape")
        yield name, tuple(experts.get(id(parameter)) or split or full_shape(parameter))


def _is_adapter(model: Any, name: str) -> bool:
    prefix: str = getattr(model.base_model, "prefix", "lora_")
    return prefix in name or ".modules_to_save." in name
