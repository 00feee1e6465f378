"""Overrides on one engine: what is allowed, and what is taken down with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed import set_optimizer_flags
from torch import nn

from ds_etp.errors import config_error
from ds_etp.patches.base import override

_COMPILED_AUTOGRAD = "compiled_autograd_enabled"


def refresh_optimizer_flags(engine: Any, model: nn.Module) -> None:
    """Has Muon look at the parameters' shapes anew, which sharding has changed."""
    set_optimizer_flags(engine._config, model)


def allow_zero3_experts(engine: Any) -> None:
    """ZeRO-3 turns down MoE layers that aren't AutoEP's (deepspeed 0.19.5 to 0.19.8). Ours are partitioned alike.

    Earlier releases are refused at ZeRO-3, by `versions.check_host_versions`.
    """
    if int(engine.zero_optimization_stage()) != 3:
        return

    def make(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: None

    override(engine, "_validate_zero3_moe_compatibility", make)


def mark_low_precision_experts(engine: Any, modules: Iterable[nn.Module]) -> None:
    """Has parameters and gradients of experts sent in autocast's dtype where `lower_precision_safe_modules` says so.

    DeepSpeed (0.19.5 to 0.19.8) compares a module's class with the listed ones, and a split module's class is made of
    its own and ours. Can go when it takes subclasses.
    """
    if not engine.torch_autocast_enabled():
        return
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    listed = set(engine.torch_autocast_lower_precision_safe_modules())
    for module in modules:
        if listed & {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, engine.torch_autocast_dtype())


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


def refuse_compiled_autograd(engine: Any) -> None:
    """Makes `engine.compile` refuse `compiled_autograd_enabled` (deepspeed 0.19.5 to 0.19.8) with a `ConfigError`.

    It would trace backward as a whole: also the dispatchers' messages, some of which are started in one node and
    awaited in another, with row counts that are the host's. Can go when it has been shown to give right numbers.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def compile(*args: Any, **kwargs: Any) -> Any:
            if signature.bind(*args, **kwargs).arguments.get(_COMPILED_AUTOGRAD):
                raise config_error(
                    f"engine.compile({_COMPILED_AUTOGRAD})",
                    True,
                    "is not supported: it would trace the messages that experts send in backward",
                    works="false: what lies between the experts is compiled, forward and backward",
                )
            return original(*args, **kwargs)

        return compile

    override(engine, "compile", make)
