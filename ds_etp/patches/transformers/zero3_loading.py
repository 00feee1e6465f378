"""`from_pretrained` at ZeRO-3 of a checkpoint with one tensor an expert, where attention is split by AutoTP.

transformers (up to 5.24) refuses to fuse such tensors when the DeepSpeed config has tensor parallelism, in case
AutoTP has cut the weights by then. It hasn't: AutoTP splits in `deepspeed.initialize`, after loading. Can go
when transformers asks the model instead of the config.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from transformers.integrations import deepspeed as host

from ds_etp.config.deepspeed import BLOCK
from ds_etp.patches.base import MethodPatch, swapped

_NAME = "_apply_weight_conversions_to_state_dict"


def loading_patches() -> list[MethodPatch]:
    """The patch, not yet applied; none where this transformers has no such guard."""
    if not inspect.isgeneratorfunction(inspect.unwrap(getattr(host, _NAME, len))):
        return []
    return [MethodPatch(host, _NAME, _convert_before_the_split)]


def _convert_before_the_split(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Iterator[Any]:
        parts = original(*args, **kwargs)
        config = host.deepspeed_config()
        if config is None or BLOCK not in config:
            yield from parts
            return
        shown = {key: value for key, value in config.items() if key != "tensor_parallel"}
        # The guard runs before the first part is made.
        with swapped(host, "deepspeed_config", lambda _: lambda: shown):
            first = next(parts)
        yield first
        yield from parts

    return convert
