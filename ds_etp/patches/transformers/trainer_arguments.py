"""Trainers' arguments, as transformers' Trainer lays them beside the DeepSpeed config: before there is an engine.

Other packages' trainers derive their arguments from transformers'. What is known of one of them hangs here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_etp.config.deepspeed import BLOCK
from ds_etp.patches.base import MethodPatch

# Is called with a trainer's arguments and the size of tensor parallelism, above 1, of a config with our block.
ArgumentsCheck = Callable[[Any, int], None]


def argument_patches(checks: Sequence[ArgumentsCheck]) -> list[MethodPatch]:
    """The patch that calls `checks`, not yet applied. They are not called without tensor parallelism and the block."""

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def trainer_config_process(self: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
            tp = tp_size(self.config)
            for check in checks if tp > 1 else ():
                check(args, tp)
            return original(self, args, *rest, **kwargs)

        return trainer_config_process

    return [MethodPatch(HfTrainerDeepSpeedConfig, "trainer_config_process", checked)]


def tp_size(config: Any) -> int:
    """Ranks that hold the same batch, by a DeepSpeed config; 1 without our block."""
    block = config.get(BLOCK)
    if not isinstance(block, dict) or block.get("enabled") is False:
        return 1
    return int(config.get("tensor_parallel", {}).get("autotp_size", 1))


def tp_of(trainer: Any) -> int:
    """Ranks that hold the same batch, of a trainer; 1 without our block."""
    # Not `args.hf_deepspeed_config`: where `accelerate launch` names the config file, there is none.
    plugin = trainer.accelerator.state.deepspeed_plugin
    return 1 if plugin is None else tp_size(plugin.deepspeed_config)


def names_in(package: str, args: Any) -> list[str]:
    """The classes that a trainer's arguments have from `package`, nearest first."""
    return [base.__name__ for base in type(args).__mro__ if base.__module__.startswith(f"{package}.")]
