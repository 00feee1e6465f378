"""The methods of one engine that save, load and export: ds_etp's in place of DeepSpeed's (0.19.5 to 0.19.8).

Why, and when each can go, is said where they are: `checkpoint.api` and `checkpoint.export_api`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ds_etp.checkpoint.api import finish_save_alone, load_checkpoint, save_checkpoint
from ds_etp.checkpoint.export_api import consolidated_state_dict, write_model
from ds_etp.checkpoint.hub import WEIGHTS
from ds_etp.log import logger
from ds_etp.patches.accelerate.state_dict import install_save_state
from ds_etp.patches.base import override
from ds_etp.patches.deepspeed.engine import raw_config
from ds_etp.patches.deepspeed.overrides import on_destroy
from ds_etp.patches.deepspeed.shard_save_guard import refuse_shard_saves
from ds_etp.patches.transformers.trainer_saves import install_trainer_saves

_GATHER = "stage3_gather_16bit_weights_on_model_save"
# `save_fp16_model` is the older name of `save_16bit_model`; accelerate calls the two that consolidate.
_CONSOLIDATING = ("_zero3_consolidated_16bit_state_dict", "_consolidated_16bit_state_dict")


def install_checkpoints(engine: Any) -> None:
    """Makes an engine save and load checkpoints in ds_etp's format."""

    def saver(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: save_checkpoint(engine, *args, **kwargs)

    def loader(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: load_checkpoint(engine, *args, **kwargs)

    override(engine, "save_checkpoint", saver)
    override(engine, "load_checkpoint", loader)
    # Without a collective: DeepSpeed's `__del__` calls `destroy`, at a different time on each rank.
    on_destroy(engine, lambda: finish_save_alone(engine))
    if engine.ds_etp.block.async_save:
        install_trainer_saves()
        install_save_state()


def install_exports(engine: Any, model: nn.Module) -> None:
    """Makes one engine's export methods write the whole model."""
    wanted = raw_config(engine).get("zero_optimization", {}).get(_GATHER)
    # DeepSpeed's default is off, since gathering is slow and needs memory for all on rank 0. Then Trainer writes
    # a checkpoint instead of a model. Ours goes one tensor at a time, so only an explicit false turns it off.
    gather = wanted is not False or engine.zero_optimization_stage() != 3

    def allowed(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: gather

    def save(_: Callable[..., Any]) -> Callable[..., Any]:
        def save_16bit_model(
            save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
        ) -> bool:
            """Writes the folder that `ds_etp.save_pretrained` writes, in the type the model computes in.

            A `save_filename` that ends in `.safetensors` names the weights file; any other means
            `model.safetensors`, as no pickles are written.
            """
            if not gather:
                logger().info("%s: nothing was saved, because %s is false", save_dir, _GATHER)
                return False
            name = save_filename if save_filename.endswith(".safetensors") else WEIGHTS
            write_model(engine, Path(save_dir), weights_name=name, exclude_frozen=exclude_frozen_parameters)
            return True

        return save_16bit_model

    def consolidate(_: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(consolidated_state_dict, engine)

    refuse_shard_saves(model)
    override(engine, "zero_gather_16bit_weights_on_model_save", allowed)
    override(engine, "save_16bit_model", save)
    override(engine, "save_fp16_model", save)
    for name in _CONSOLIDATING:
        override(engine, name, consolidate)
