"""Modules that transformers records router logits from (5.0 to 5.24).

It records them with hooks on the modules that `_can_record_outputs` of the model's class names. A pipeline has to do so
itself, since no rank runs the whole model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_KEY = "router_logits"


def router_modules(base: nn.Module, layer: nn.Module, path: str) -> list[tuple[nn.Module, int]]:
    """Modules of a layer whose output is router logits, and where in a tuple of outputs these are.

    Args:
        base: the model whose class says so.
        layer: one of its layers.
        path: of the layer in `base`.
    """
    recorders = (getattr(type(base), "_can_record_outputs", None) or {}).get(_KEY, [])
    found = []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        for name, module in layer.named_modules(prefix=path):
            if _matches(recorder, name, module):
                found.append((module, int(getattr(recorder, "index", 1))))
    return found


def _matches(recorder: Any, name: str, module: nn.Module) -> bool:
    if isinstance(recorder, type):
        return isinstance(module, recorder)
    if isinstance(recorder, str):
        return name.endswith(recorder)
    suffix, inside = getattr(recorder, "class_name", None), getattr(recorder, "layer_name", None)
    if inside is not None and f".{inside.strip('.')}." not in f".{name}.":
        return False
    target = recorder.target_class
    return (target is not None and isinstance(module, target)) or (suffix is not None and name.endswith(suffix))


def router_logits(output: Any, index: int) -> Tensor:
    """The logits `[T, E]` in what such a module gave."""
    logits: Tensor = output[index] if isinstance(output, tuple) else output
    return logits
