"""`from_pretrained` that leaves tensors in their files.

transformers (5.24) opens a checkpoint's files, renames what is in them, runs its conversions on it and puts the
results into the model. It takes each tensor from its file before it converts it. Here it gets tensors that do
that when they are asked for data. Names, conversions, types, ties and reports stay its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import modeling_utils
from transformers.integrations import deepspeed as zero_config
from transformers.utils import logging

from ds_etp.loading.lazy import LazyTensor, Leaf
from ds_etp.patches.base import MethodPatch


def _with_lazy_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        # A slice of safetensors becomes the mapped tensor: no page of it is read before it is looked at.
        given.arguments["state_dict"] = {
            name: LazyTensor(Leaf(value if isinstance(value, Tensor) else value[...]))
            for name, value in given.arguments["state_dict"].items()
        }
        return original(*given.args, **given.kwargs)

    return convert


@contextmanager
def left_in_files() -> Iterator[None]:
    """Inside, `from_pretrained` makes models whose parameters and persistent buffers are `LazyTensor`s."""
    patch = MethodPatch(modeling_utils, "convert_and_load_state_dict_in_model", _with_lazy_tensors)
    # At ZeRO-3 it would gather every parameter to fill it. There is nothing to fill, and the engine partitions later.
    alive = zero_config._hf_deepspeed_config_weak_ref
    # Nothing is read yet: the bar that counts comes later.
    bars = logging.is_progress_bar_enabled()
    patch.apply()
    zero_config.unset_hf_deepspeed_config()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        patch.revert()
        zero_config._hf_deepspeed_config_weak_ref = alive
        if bars:
            logging.enable_progress_bar()
