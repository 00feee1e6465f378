"""The two things we ask of transformers' experts interface (5.0 to 5.24)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations import moe

from ds_etp.errors import config_error


def default_gate() -> Callable[..., Tensor]:
    """The `_apply_gate` that classes without one of their own get: it works on any slice of gate and up."""
    gate: Callable[..., Tensor] = moe._default_apply_gate
    return gate


def refuse_split_model(model: nn.Module) -> None:
    """Refuses a model that transformers' own tensor or expert parallelism has split already.

    Raises:
        ConfigError: names the argument to leave out.
    """
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is not None:
        raise config_error(
            "tp_plan",
            getattr(model, "_tp_plan", None) and "auto",
            f"in from_pretrained has split {type(model).__name__} already",
            works="no tp_plan: set tensor_parallel.autotp_size and expert_tensor_parallel in the DeepSpeed config",
        )
