"""`ds_etp.from_pretrained`: a model with deferred experts, of which each rank reads only its own shard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from ds_etp.checkpoint.export_api import as_dtype
from ds_etp.config import block as block_config
from ds_etp.config.deepspeed import autotp_size, half_dtype, zero_stage
from ds_etp.config.dense_rules import check_axes
from ds_etp.config.file import read_config_file
from ds_etp.config.host_rules import check_host_options
from ds_etp.engine import register
from ds_etp.errors import CheckpointError, config_error
from ds_etp.experts.checks import check_divisible
from ds_etp.experts.registry import find_experts, read_layout
from ds_etp.loading.deferred import defer_loading
from ds_etp.parallel.consensus import raise_on_all_ranks
from ds_etp.parallel.topology import Topology
from ds_etp.patches.deepspeed.ulysses import check_sequences, ulysses_world_size
from ds_etp.patches.transformers.lazy_loading import lazy_state_dict
from ds_etp.patches.versions import check_sequence_version

# What `from_pretrained` of transformers takes and this can't do, with what to do instead.
_REFUSED = {
    "device_map": "The engine moves each rank's shard to its device",
    "tp_plan": "Set tensor_parallel.autotp_size in the DeepSpeed config",
    "tp_size": "Set tensor_parallel.autotp_size in the DeepSpeed config",
    "distributed_config": "Set tensor_parallel.autotp_size in the DeepSpeed config",
    "quantization_config": "Quantized weights can't be trained",
    "gguf_file": "Convert the file to safetensors",
    "state_dict": "Use the from_pretrained of transformers",
    "ignore_mismatched_sizes": "A part of the experts can't be made up",
}
_WHERE_CONFIG_IS = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code", "local_files_only")


def from_pretrained(
    path: str | Path,
    ds_config: Mapping[str, Any] | str | Path,
    *,
    model_class: Any = None,
    dtype: torch.dtype | str | None = None,
    progress: bool = True,
    **model_kwargs: Any,
) -> Any:
    """A transformers model whose experts `deepspeed.initialize` will read, each rank its own shard and no more.

    It is the model that `model_class.from_pretrained(path)` gives, to the bit, once it is in an engine with an
    `expert_tensor_parallel` block. Until then its experts have their shapes and names but no values: they can't be run,
    copied or saved. Optimizers and PEFT adapters may be made. All other weights are there, mapped from the files
    where they have the model's type, so that ranks of a node share them until the engine changes or moves them.

    Sizes are checked with the context parallel size that Ulysses was registered with, where it was before. A model
    for a pipeline isn't loaded so: each stage would read all layers.

    Every rank has to call it. It registers ds_etp, and where there is no process group yet it makes one, as
    `deepspeed.initialize` does. Models whose experts are lists of modules (see `fuse_experts`) can't be loaded so.

    Args:
        path: a folder with safetensors, or a model id of the hub.
        ds_config: the DeepSpeed config, or its file; what is wrong with it for this model is said here. Without our
            block the model is loaded as transformers does.
        model_class: whose `from_pretrained` to use; None for `AutoModelForCausalLM`.
        dtype: of the weights; None for that in the model's config.
        progress: whether rank 0 shows a bar while experts are read.
        model_kwargs: what `model_class.from_pretrained` takes, such as `experts_implementation`.

    Raises:
        ConfigError: a setting that can't work with this model.
        CheckpointError: weights are missing, damaged or of another shape; on every rank alike.
    """
    raw = ds_config if isinstance(ds_config, Mapping) else read_config_file(ds_config)
    wanted = None if dtype == "auto" else as_dtype(dtype)
    arguments: dict[str, Any] = {**model_kwargs, **({} if wanted is None else {"dtype": wanted})}
    block = block_config.parse_block(raw)
    loader = model_class or AutoModelForCausalLM
    register()
    if block is None:
        return loader.from_pretrained(path, **arguments)
    topology = _checked_topology(raw, block, model_kwargs)
    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    arguments["use_safetensors"] = True
    with raise_on_all_ranks(f"loading {path}"):
        _refuse_quantized(path, arguments)
        with lazy_state_dict():
            model, report = loader.from_pretrained(path, output_loading_info=True, **arguments)
        if report["missing_keys"]:
            names = sorted(report["missing_keys"])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise CheckpointError(f"its files don't hold {', '.join(names[:4])}{more} of {type(model).__name__}")
    layouts = {experts: read_layout(experts, module) for experts, module in find_experts(model).items()}
    check_sequences(model, topology)
    for experts, layout in layouts.items():
        check_divisible(topology, experts, layout)
    defer_loading(model, layouts, progress=progress)
    return model


def _checked_topology(
    raw: Mapping[str, Any], block: block_config.ExpertTensorParallelConfig, model_kwargs: Mapping[str, Any]
) -> Topology:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    check_host_options(raw, world)
    cp = ulysses_world_size()
    check_sequence_version(cp)
    topology = block_config.resolve(block, world=world, tp=autotp_size(raw), cp=cp)
    block_config.check_dispatcher(block, topology)
    check_axes(topology, zero_stage(raw), half_dtype(raw))
    for name, advice in _REFUSED.items():
        if model_kwargs.get(name):
            raise config_error(
                name, model_kwargs[name], "does not work in ds_etp.from_pretrained", next_step=f"{advice}."
            )
    return topology


def _refuse_quantized(path: str | Path, arguments: Mapping[str, Any]) -> None:
    about = arguments.get("config")
    if about is None:
        about = AutoConfig.from_pretrained(
            path, **{key: arguments[key] for key in _WHERE_CONFIG_IS if key in arguments}
        )
    if getattr(about, "quantization_config", None):
        raise CheckpointError("its weights are quantized, and a part of an expert can't be read from them")
