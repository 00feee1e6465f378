"""Overrides on one engine: what is allowed, what is refused, and what is taken down with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_etp.patches.base import override

# DeepSpeed's own savers write one rank's experts and return True; loading them trains on with wrong weights.
_NOT_YET = (
    "save_checkpoint",
    "load_checkpoint",
    "save_16bit_model",
    "save_fp16_model",
    "_zero3_consolidated_16bit_state_dict",
    "_consolidated_16bit_state_dict",
)


def allow_zero3_experts(engine: Any) -> None:
    """ZeRO-3 turns down MoE layers that aren't AutoEP's (deepspeed 0.19.5 to 0.19.8). Ours are partitioned alike."""

    def make(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: None

    override(engine, "_validate_zero3_moe_compatibility", make)


def refuse_checkpoints(engine: Any) -> None:
    """Raises instead of writing files that hold one rank's experts under the whole model's names."""

    def refusal(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(_: Callable[..., Any]) -> Callable[..., Any]:
            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError(
                    f"{name}: ds_etp does not write or read checkpoints yet, and DeepSpeed's own would hold one "
                    "rank's experts only. Nothing was written."
                )

            return refuse

        return make

    for name in _NOT_YET:
        if hasattr(engine, name):
            override(engine, name, refusal(name))


def on_destroy(engine: Any, release: Callable[[], None]) -> None:
    """Calls `release` after the engine's own `destroy()`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy() -> None:
            try:
                original()
            finally:
                release()

        return destroy

    override(engine, "destroy", make)


def after_optimizer(engine: Any, correct: Callable[[], None]) -> None:
    """Calls `correct` once the engine has built its optimizer."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _configure_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            correct()
            return result

        return _configure_optimizer

    override(engine, "_configure_optimizer", make)
