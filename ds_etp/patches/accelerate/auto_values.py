"""`"auto"` in the `expert_tensor_parallel` block, kept from accelerate (1.11 to 1.16).

accelerate takes every `"auto"` of a DeepSpeed config for a placeholder of its own: before it makes an engine, in
`DeepSpeedPlugin.deepspeed_config_process`, it fills in those it knows and raises ValueError for others. Trainer and
TRL's trainers go through it too. In this block `"auto"` is a value, for ds_etp to read. Can go when accelerate leaves
blocks alone that it doesn't know.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ds_etp.config.deepspeed import BLOCK
from ds_etp.patches.base import MethodPatch

MODULE = "accelerate.utils.dataclasses"


def keep_block_from_accelerate() -> None:
    """Has accelerate's plugins, also those made before, leave the block alone. Where it isn't loaded, does nothing.

    The patch stays when ds_etp is unregistered: whoever then meets the block says that nobody reads it, which is what
    accelerate's own message would hide.
    """
    plugin = getattr(sys.modules.get(MODULE), "DeepSpeedPlugin", None)
    if plugin is not None and "fill_match" in vars(plugin):
        MethodPatch(plugin, "fill_match", _without_block).apply()


def _without_block(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        if ds_key_long.partition(".")[0] == BLOCK:
            return None
        return original(self, ds_key_long, *args, **kwargs)

    return fill_match
