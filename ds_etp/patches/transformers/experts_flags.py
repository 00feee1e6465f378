"""What `use_experts_implementation` (transformers 5.0 to 5.24) leaves on an experts module under private names.

On the floor of `experts`, whose reader of layouts asks for it; it imports nothing of transformers. The public flags
(`has_gate`, `is_transposed`, ...) are read where they are needed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_decorated(module: nn.Module) -> bool:
    """Whether a module takes part in transformers' choice of an experts implementation."""
    return hasattr(type(module), "_apply_gate") and "has_bias" in vars(module)


def apply_gate(module: Any, gate_up: Tensor) -> Tensor:
    """The gate function of a decorated module on `[..., 2I]`, to `[..., I]`."""
    gated: Tensor = module._apply_gate(gate_up)
    return gated


def is_split_by_transformers(module: nn.Module) -> bool:
    """Whether transformers' own expert parallelism has split a module (from 5.18)."""
    return bool(getattr(module, "_is_expert_parallel", False))


def experts_implementation(module: nn.Module) -> str | None:
    """What the module's config names, such as `grouped_mm`; None without a config, or where it leaves it open."""
    named: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return named
