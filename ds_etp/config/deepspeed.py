"""A raw DeepSpeed config, read as DeepSpeed reads it, before DeepSpeed does. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

BLOCK = "expert_tensor_parallel"
AUTOTP = "tensor_parallel.autotp_size"

T = TypeVar("T", bool, int, float)


def autotp_size(ds_config: Mapping[str, object]) -> int:
    """tp as DeepSpeed's AutoTP will read it from the raw config; 0, "auto" and absent mean off, which is tp 1."""
    return max(lax(int, lookup(ds_config, AUTOTP)) or 1, 1)


def zero_stage(ds_config: Mapping[str, object]) -> int:
    """The ZeRO stage."""
    return lax(int, lookup(ds_config, "zero_optimization.stage")) or 0


def half_dtype(ds_config: Mapping[str, object]) -> str | None:
    """`bfloat16` or `float16`, which the engine casts the model to; None: it stays as it is."""
    for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if is_on(lookup(ds_config, f"{key}.enabled")):
            return dtype
    return None


def is_on(value: object) -> bool:
    """Whether DeepSpeed's own models read a value as true."""
    return lax(bool, value) is True


def lookup(ds_config: Mapping[str, object], key: str) -> object:
    """The value at a dotted key, or None; a parent that is no object (`zero_optimization: true`) holds nothing."""
    value: object = ds_config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def lax(kind: type[T], value: object) -> T | None:
    """A value as DeepSpeed's own models read it: "true" and 1 are True; what does not parse ("auto") is not set."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None
