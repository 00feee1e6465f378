"""Models on the meta device for exports: of a checkpoint or a pipeline, asked for names and the hub's conversions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ds_etp.checkpoint.export import tied_names
from ds_etp.checkpoint.format import StoredCheckpoint
from ds_etp.errors import CheckpointError
from ds_etp.patches.transformers.meta_models import named_class, on_meta


def model_of_checkpoint(stored: StoredCheckpoint, config: Path | None) -> Any:
    """The checkpoint's model on the meta device.

    Args:
        stored: an open checkpoint.
        config: a folder with the model's config.json, where the checkpoint has none.

    Raises:
        CheckpointError: the checkpoint doesn't say what model it is of, or it is one of PEFT.
    """
    extra = stored.index.extra
    about = extra.get("hf_config")
    if config is not None:
        loaded = AutoConfig.from_pretrained(config)
    elif about:
        loaded = AutoConfig.for_model(**about)
    else:
        raise CheckpointError(
            f"{stored.folder} does not say how its model is built: it is none of transformers. If it is, name a folder "
            "with its config.json: ds-etp export --config FOLDER"
        )
    if str(extra.get("model_class")).startswith("Peft"):
        raise CheckpointError(
            f"{stored.folder} holds a model of PEFT. Load it into an engine, and write its adapters with "
            "ds_etp.save_pretrained(engine, folder)."
        )
    return _build(loaded, str(extra.get("model_class")), extra.get("hf_generation_config"))


def model_of_stages(module: nn.Module, names: set[str], engine: Any) -> Any:
    """The model of transformers that a pipeline was made of, on the meta device, in the type the engine computes in.

    Args:
        module: a `PipelineModule`; its attribute `hf_config` is that model's config.
        names: of the tensors of all pipeline stages.
        engine: of the module.

    Raises:
        CheckpointError: on every rank alike, where it is not known, or has other tensors.
    """
    config = getattr(module, "hf_config", None)
    if config is None:
        raise CheckpointError(
            "the PipelineModule has no attribute hf_config, the config of the model of transformers that it was made "
            "of. Save a checkpoint, and take the model out of it: ds-etp export --config FOLDER"
        )
    generation = getattr(module, "hf_generation_config", None)
    model = _build(config, (config.architectures or [""])[0], generation and generation.to_dict())
    check_names(model, names, "the PipelineModule, by its hf_names,")
    return model.to(torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)


def _build(config: Any, class_name: str, generation: Mapping[str, Any] | None) -> Any:
    # The class itself: `_from_config` would write a dtype into the config, and partition at ZeRO-3.
    model = on_meta(named_class([class_name]) or AutoModelForCausalLM.from_config, config)
    if generation and model.can_generate():
        model.generation_config = GenerationConfig.from_dict(generation)
    return model


def names_ignored_on_save(model: PreTrainedModel) -> Collection[str]:
    """Tensors that `save_pretrained` leaves out, by what the model's class says (5.0 to 5.24)."""
    return model._keys_to_ignore_on_save or ()


def check_names(model: nn.Module, stored: set[str], where: str) -> None:
    """Refuses tensors that are not those of a model.

    Raises:
        CheckpointError: names some that are missing, or unknown to the model.
    """
    known = set(model.state_dict())
    missing = known - stored - set(tied_names(model))
    unknown = stored - known
    if missing or unknown:
        listed = ", ".join(sorted(missing or unknown)[:4])
        what = "does not hold" if missing else "holds more than"
        raise CheckpointError(f"{where} {what} the weights of {type(model).__name__}: {listed}")
