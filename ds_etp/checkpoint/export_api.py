"""Export of engines and checkpoints to safetensors in the hub's format: `save_pretrained`, consolidated state dicts.

DeepSpeed's own (0.19.5 to 0.19.8) `save_16bit_model` and consolidated state dicts hold one rank's experts
under the whole model's names, or raise. These take their place on one engine (`patches.deepspeed.engine_methods`). They
can go when DeepSpeed asks a parameter for its logical tensor.
"""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ds_etp.checkpoint.export import LiveTensors, StoredTensors, full_state_dict, tied_names, write_weights
from ds_etp.checkpoint.format import LATEST, StoredCheckpoint
from ds_etp.checkpoint.hub import SHARD_SIZE, WEIGHTS
from ds_etp.errors import config_error
from ds_etp.experts.fuse import unfuse
from ds_etp.patches.deepspeed.compute_weights import compute_weights
from ds_etp.patches.deepspeed.optimizer_states import states_of
from ds_etp.patches.deepspeed.pipeline import topology_of
from ds_etp.patches.peft.expert_lora import is_peft_model
from ds_etp.patches.peft.export import save_adapters, without_empty_wrapper
from ds_etp.patches.transformers.export_models import (
    check_names,
    model_of_checkpoint,
    model_of_stages,
    names_ignored_on_save,
)

# What a tokenizer or processor consists of, by how transformers names the files.
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template*", "preprocessor_config.json", "processor_config.json"),
)


def hub_tensors(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """TensorSource of a transformers model under the hub's names: fused experts taken apart, prefixes put back.

    The steps that `PreTrainedModel.save_pretrained` (5.0 to 5.24) takes, without its `state_dict()`, its
    collectives and its copies of the whole model.
    """
    state = unfuse(model, state)
    if not isinstance(model, PreTrainedModel):
        return state
    ignored = names_ignored_on_save(model)
    converted: dict[str, Tensor] = revert_weight_conversion(
        model, {name: tensor for name, tensor in state.items() if name not in ignored}
    )
    return converted


def save_config(model: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes config.json and generation_config.json of a model, the type its weights were saved in among it."""
    if not isinstance(model, PreTrainedModel):
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def save_pretrained(
    engine: Any,
    save_directory: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    tokenizer: Any = None,
    max_shard_size: int | str = SHARD_SIZE,
) -> None:
    """Writes an engine's model as a folder that `from_pretrained` loads. Every rank has to call it.

    Of a model with adapters of PEFT, the adapters: a folder for `PeftModel.from_pretrained`.

    Args:
        engine: a DeepSpeed engine, its experts split by ds_etp or not.
        save_directory: where to, a folder that rank 0 can write to.
        dtype: what weights are cast to. None keeps the type the model computes in. `torch.float32` takes the
            optimizer's master weights, where there are any.
        tokenizer: a tokenizer or processor, saved beside the model.
        max_shard_size: of one weights file, as in transformers.

    Raises:
        CheckpointError: a file could not be written; on every rank alike.
    """
    write_model(engine, Path(save_directory), dtype=as_dtype(dtype), max_shard_size=max_shard_size)
    if tokenizer is not None and dist.get_rank() == 0:
        tokenizer.save_pretrained(save_directory)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype from its name, such as `bf16` or `bfloat16`.

    Raises:
        ConfigError: it isn't the name of a floating-point type.
    """
    short = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = short.get(dtype, getattr(torch, dtype.removeprefix("torch."), None))
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise config_error("dtype", dtype, "is not a type for weights", works=(*short, "bfloat16", "float32"))
    return found


def write_model(
    engine: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    weights_name: str = WEIGHTS,
    exclude_frozen: bool = False,
) -> None:
    """`save_pretrained` with every choice: the weights file's name, and whether frozen parameters are left out."""
    model = without_empty_wrapper(engine.module)
    topology = topology_of(engine)
    with _all_partitioned(engine):
        states = states_of(engine) if dtype == torch.float32 else compute_weights(engine)
        tensors = LiveTensors(engine, topology, states, exclude_frozen=exclude_frozen, model=model)
        if is_peft_model(model):
            save_adapters(model, tensors, folder, dtype)
            return
        if engine.pipeline_parallelism:
            model = model_of_stages(model, set(tensors.specs), engine)
        to_hub = functools.partial(hub_tensors, model)
        write_weights(folder, tensors, to_hub, dtype=dtype, max_shard_size=max_shard_size, weights_name=weights_name)
    if dist.get_rank() == 0:
        save_config(model, folder, dtype)
    dist.barrier()


@contextmanager
def _all_partitioned(engine: Any) -> Iterator[None]:
    """ZeRO-3's parameters at rest: none prefetched, none left gathered by an evaluation."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()


def consolidated_state_dict(engine: Any, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
    """The full state dict under Hugging Face names, on rank 0's CPU; None elsewhere. Every rank has to call it."""
    topology = topology_of(engine)
    with _all_partitioned(engine):
        tensors = LiveTensors(engine, topology, compute_weights(engine), exclude_frozen=exclude_frozen_parameters)
        return full_state_dict(tensors, tied_names(engine.module))


def find_tag(checkpoint: Path) -> Path:
    """The tag's folder: the given one, or the one that `latest` in it names."""
    latest = checkpoint / LATEST
    if latest.exists():
        return checkpoint / latest.read_text(encoding="utf-8").strip()
    return checkpoint


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | str | None = None,
    config: Path | None = None,
    max_shard_size: int | str = SHARD_SIZE,
) -> list[str]:
    """Writes the model of a checkpoint as a folder that `from_pretrained` loads. One process, no engine.

    Args:
        checkpoint: what `save_checkpoint` wrote, or one tag in it, or a Trainer's `checkpoint-N`.
        out: the folder to write.
        dtype: what weights are cast to; None takes the type the model computed in.
        config: a folder with the model's config.json, where the checkpoint has none.
        max_shard_size: of one weights file, as in transformers.

    Returns:
        The names of the files it wrote.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or of a model that can't be exported.
    """
    tag = find_tag(checkpoint)
    with StoredCheckpoint.open(tag) as stored:
        model = model_of_checkpoint(stored, config)
        computed = as_dtype(str(model.config.dtype or "float32"))
        assert computed is not None
        target = as_dtype(dtype) or computed
        tensors = StoredTensors(stored, target)
        check_names(model, set(tensors.specs), str(tag))
        to_hub = functools.partial(hub_tensors, model)
        write_weights(out, tensors, to_hub, dtype=target, max_shard_size=max_shard_size)
    save_config(model, out, target)
    # Trainer saves them beside the tag; a user may have put them into it.
    for folder in dict.fromkeys((checkpoint, tag.parent, tag, *((config,) if config else ()))):
        for pattern in _TOKENIZER_FILES:
            for path in folder.glob(pattern):
                if path.is_file() and not path.name.endswith(".safetensors"):
                    shutil.copy(path, out / path.name)
    return sorted(path.name for path in out.iterdir())
