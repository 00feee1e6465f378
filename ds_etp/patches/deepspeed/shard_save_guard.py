"""Refuses the model's own save methods while its parameters are shards.

`PreTrainedModel.save_pretrained` without a state dict (transformers 5.0 to 5.24), that of PEFT's `PeftModel` (0.21) and
`PipelineModule.save_state_dict` (deepspeed 0.19.8) would write this rank's shards under the full model's parameter
names. Each raises `CheckpointError`, which names the ds_etp call that gathers them. Can go when they ask a parameter
for its full tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from ds_etp.errors import CheckpointError
from ds_etp.patches.base import override
from ds_etp.patches.peft.expert_lora import is_peft_model


def refuse_shard_saves(model: Any) -> None:
    """Makes `save_pretrained` of an engine's module raise `CheckpointError` where it would write shards.

    Around a model of transformers PEFT has one of its own. The inner one comes out by itself when adapters are
    merged and unloaded.
    """
    parts = [model, model.get_base_model()] if is_peft_model(model) else [model]
    for part in parts:
        if is_peft_model(part) or isinstance(part, PreTrainedModel):
            override(part, "save_pretrained", functools.partial(_checked, part))


def _checked(model: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        positional = not is_peft_model(model) and len(args) > 1 and args[1] is not None
        found = None if positional or kwargs.get("state_dict") is not None else _in_shards(model)
        if found is not None:
            raise CheckpointError(
                f"save_pretrained({str(save_directory)!r}) of the model would write {found}. "
                "Call ds_etp.save_pretrained(engine, folder) on every rank instead."
            )
        return original(save_directory, *args, **kwargs)

    return save_pretrained


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
    """What `save_pretrained` would write wrong; None where it is right."""
    if not is_peft_model(model):
        return "this rank's shards under the whole model's names"
    for name, parameter in model.named_parameters():
        cut = hasattr(parameter, "ds_id") or getattr(parameter, "tensor_model_parallel", False)
        if parameter.requires_grad and cut:
            return f"this rank's part of {name}"
    return None
