"""Callbacks of transformers' Trainer: registering without a wrapper around the script, and a last save on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ds_etp.config.block import parse_block
from ds_etp.config.deepspeed import BLOCK
from ds_etp.engine import is_registered, register
from ds_etp.errors import ConfigError
from ds_etp.experts.sharded import sharded_modules
from ds_etp.log import logger
from ds_etp.patches.base import override


class ExpertTensorParallelCallback(TrainerCallback):  # type: ignore[misc]  # a class without type information
    """Registers ds_etp when it is made, and sees that the experts are split when training begins.

    Give it to a Trainer: `Trainer(..., callbacks=[ExpertTensorParallelCallback()])`. Under ZeRO-3, make it before the
    model is loaded.
    """

    def __init__(self) -> None:
        register()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Called by Trainer, once the engine is made.

        Raises:
            ConfigError: the DeepSpeed config has the block, and the experts are not split.
        """
        config = getattr(getattr(args, "hf_deepspeed_config", None), "config", None) or {}
        if parse_block(config) is None or next(sharded_modules(model), None) is not None:
            return
        registered = "" if is_registered() else ", as ds_etp.unregister() was called since"
        raise ConfigError(
            f"{BLOCK} is in the DeepSpeed config, but the experts are not split{registered}: the engine was made "
            "before ds_etp was registered. Make ExpertTensorParallelCallback() before the Trainer."
        )


class SaveOnAllRanks(TrainerCallback):  # type: ignore[misc]
    """Writes the model when training ends, on all ranks, for a host that then saves on rank 0 alone.

    Such a host's `model.save_pretrained` into the same folder does nothing any more. Under ZeRO-3 hosts call
    `trainer.save_model` on all ranks themselves, so this does nothing.

    Args:
        trainer: of the model.
        folder: what the host saves into.
    """

    def __init__(self, trainer: Any, folder: str | Path) -> None:
        self.trainer, self.folder = trainer, Path(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by Trainer on every rank, after the best model was loaded, if it is to be."""
        model = self.trainer.model
        if is_deepspeed_zero3_enabled() or next(sharded_modules(model), None) is None:
            return
        self.trainer.save_model(str(self.folder))
        override(model, "save_pretrained", self._saved)

    def _saved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            if Path(save_directory).resolve() != self.folder.resolve() or kwargs.get("state_dict") is not None:
                return original(save_directory, *args, **kwargs)
            logger().info("%s: the model was written on all ranks when training ended", self.folder)
            return None

        return save_pretrained
