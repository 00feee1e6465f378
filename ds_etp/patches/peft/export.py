"""A model with adapters of PEFT goes out as PEFT saves it: the adapters alone, in a folder of their own format.

PEFT's `save_pretrained` (0.18 to 0.21) takes a state dict of the model and picks what it writes. Here it is first asked
which tensors those are, so that no base weight is gathered for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.checkpoint.export import LiveTensors
from ds_etp.parallel.consensus import broadcast_object, raise_if_any_failed
from ds_etp.patches.peft.expert_lora import is_adapted, is_peft_model


def without_empty_wrapper(model: Any) -> Any:
    """The model itself, or the one of transformers inside one of PEFT whose adapters are unloaded, merged or not."""
    if is_peft_model(model) and not is_adapted(model):
        return model.get_base_model()
    return model


def save_adapters(model: Any, tensors: LiveTensors, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes the adapters of an engine's model. Every rank has to call it; rank 0 writes.

    Args:
        model: the engine's module.
        tensors: its tensors, unsharded.
        folder: where to.
        dtype: what they are cast to; None keeps their types.

    Raises:
        CheckpointError: they could not be written; on every rank alike.
    """
    state: dict[str, Tensor] = {}
    for name in broadcast_object(_written(model, tensors)):
        tensor = tensors.full(name)
        if tensor is not None:
            state[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            model.save_pretrained(folder, state_dict=state)
        except Exception as error:
            failure = error
    raise_if_any_failed(f"writing adapters to {folder}", failure)


def _written(model: Any, tensors: LiveTensors) -> list[str]:
    """Which of the model's tensors PEFT writes, found by letting it pick from placeholders."""
    from peft import get_peft_model_state_dict

    names = [*tensors.specs]
    if dist.get_rank() != 0:
        return names
    placeholders = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in tensors.specs.items()
    }
    picked = {
        id(tensor)
        for adapter in model.peft_config
        for tensor in get_peft_model_state_dict(model, state_dict=dict(placeholders), adapter_name=adapter).values()
    }
    if not picked <= {id(tensor) for tensor in placeholders.values()}:
        return names  # it made tensors of its own from them: it gets everything
    return [name for name in names if id(placeholders[name]) in picked]
