"""The way into DeepSpeed's engine: four of its methods, the same from 0.18.6 to 0.19.8.

DeepSpeed has no plugin mechanism. These are the moments that matter: sizes known and nothing made yet,
just before AutoTP, just before the model is cast, moved and broadcast, and around the making of the optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_etp.patches.base import MethodPatch


def raw_config(engine: Any) -> dict[str, Any]:
    """The engine's config as it was given, blocks that DeepSpeed doesn't know included (0.18.6 to 0.19.8)."""
    raw: dict[str, Any] = engine._config._param_dict
    return raw


class EngineEvents(Protocol):
    """What an extension does at each of the moments. Each must do nothing without the extension's block."""

    def on_config(self, engine: Any) -> None:
        """The config is parsed; no group is made, no model is touched."""

    def wrap_autotp(self, engine: Any, model: Any) -> AbstractContextManager[None]:
        """AutoTP is about to make its groups and split the model; afterwards it has."""

    def on_model(self, engine: Any, model: Any) -> None:
        """AutoTP is done; cast, device move, broadcast and optimizer are to come."""

    def optimizer_arguments(self, engine: Any, client_optimizer: Any, model_parameters: Any) -> tuple[Any, Any]:
        """The optimizer is to be made from these; what it is to be made from instead."""

    def on_optimizer(self, engine: Any) -> None:
        """The optimizer is there, wrapped by ZeRO; nothing has been stepped."""


def engine_patches(events: EngineEvents) -> list[MethodPatch]:
    """The patches that call `events`, not yet applied."""

    def sanity_check(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _do_sanity_check(self: Any) -> Any:
            result = original(self)
            # 0.19.4 and later have set it by now; earlier ones will, by what has made it an engine of this class.
            if "pipeline_parallelism" not in vars(self):
                self.pipeline_parallelism = isinstance(self, PipelineEngine)
            events.on_config(self)
            return result

        return _do_sanity_check

    def tensor_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _configure_tensor_parallel(self: Any, model: Any, tp_config: Any) -> Any:
            with events.wrap_autotp(self, model):
                return original(self, model, tp_config)

        return _configure_tensor_parallel

    def distributed_model(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _configure_distributed_model(self: Any, model: Any) -> Any:
            events.on_model(self, model)
            return original(self, model)

        return _configure_distributed_model

    def optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
            result = original(self, *events.optimizer_arguments(self, client_optimizer, model_parameters))
            events.on_optimizer(self)
            return result

        return _configure_optimizer

    return [
        MethodPatch(DeepSpeedEngine, "_do_sanity_check", sanity_check),
        MethodPatch(DeepSpeedEngine, "_configure_tensor_parallel", tensor_parallel),
        MethodPatch(DeepSpeedEngine, "_configure_distributed_model", distributed_model),
        MethodPatch(DeepSpeedEngine, "_configure_optimizer", optimizer),
    ]
