"""`from_pretrained` with lazy tensors: weights stay in their safetensors files until they are asked for.

transformers (5.0 to 5.24) opens a checkpoint's files, renames what is in them, runs its conversions on it and puts the
results into the model. It takes each tensor from its file before it converts it. Here it gets lazy tensors, which are
read when they are asked for data. Names, conversions, types, ties and reports stay its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import modeling_utils
from transformers.integrations import deepspeed as zero_config
from transformers.utils import logging

from ds_etp.errors import CheckpointError
from ds_etp.loading.lazy import LazyTensor
from ds_etp.loading.nodes import FileTensor
from ds_etp.patches.base import swapped


def _with_lazy_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        # A slice of safetensors becomes the mapped tensor: no page of it is read before it is looked at.
        given.arguments["state_dict"] = {
            name: LazyTensor(FileTensor(value if isinstance(value, Tensor) else value[...]))
            for name, value in given.arguments["state_dict"].items()
        }
        result = original(*given.args, **given.kwargs)
        if hasattr(result[0], "mismatched_keys"):
            mismatched, errors = result[0].mismatched_keys, result[0].conversion_errors
        else:  # 5.0: missing, unexpected, mismatched, offload index, errors
            mismatched, errors = result[2], result[4]
        # Before it makes up values for these, at their full sizes.
        for name, found, wanted in sorted(mismatched):
            raise CheckpointError(f"its files hold {name} as {tuple(found)}, and the model wants {tuple(wanted)}")
        for name, reason in errors.items():
            raise CheckpointError(f"its files don't hold {name} in full: {reason.strip().splitlines()[-2]}")
        return result

    return convert


def _naming_the_file(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(filename, *args, **kwargs)
        except SafetensorError as error:
            raise CheckpointError(f"{filename}: {error}") from error

    return opened


@contextmanager
def lazy_state_dict() -> Iterator[None]:
    """Inside, `from_pretrained` makes models whose parameters and persistent buffers are `LazyTensor`s."""
    # At ZeRO-3 it would gather every parameter to fill it. There is nothing to fill, and the engine partitions later.
    alive = zero_config._hf_deepspeed_config_weak_ref
    # Nothing is read yet: the bar that counts comes later.
    bars = logging.is_progress_bar_enabled()
    zero_config.unset_hf_deepspeed_config()
    logging.disable_progress_bar()
    try:
        with (
            swapped(modeling_utils, "convert_and_load_state_dict_in_model", _with_lazy_tensors),
            swapped(modeling_utils, "safe_open", _naming_the_file),
        ):
            yield
    finally:
        zero_config._hf_deepspeed_config_weak_ref = alive
        if bars:
            logging.enable_progress_bar()
