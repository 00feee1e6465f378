"""Synchronized generation: `generate()` runs until all ranks are done, where expert ranks hold different prompts.

Each forward of a layer is collective over its expert group. transformers (5.0 to 5.24) syncs generation only
where it knows of ZeRO-3 or FSDP, so a rank whose prompts are done would leave its peers waiting.

Continuous batching (`generate_batch`, 5.0 on) can't be synchronized: a scheduler in a thread of each rank decides which
forward passes it runs. It is refused. Can go when transformers runs one scheduler for all ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from transformers import GenerationMixin

from ds_etp.errors import ConfigError
from ds_etp.patches.base import override

# What every way to batch continuously goes through.
_CONTINUOUS = "init_continuous_batching"


def sync_generation(model: nn.Module) -> None:
    """Makes every `generate` in a model run until all ranks are done."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            # Also where a caller says False: Seq2SeqTrainer does so for all but ZeRO-3.
            kwargs["synced_gpus"] = True
            return original(*args, **kwargs)

        return generate

    for module in model.modules():
        if isinstance(module, GenerationMixin):
            override(module, "generate", make)


def refuse_continuous_batching(model: nn.Module) -> None:
    """Makes a model whose forward is collective raise `ConfigError` where it would batch continuously."""
    for module in model.modules():
        if isinstance(module, GenerationMixin) and hasattr(module, _CONTINUOUS):
            override(module, _CONTINUOUS, _refused)


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_continuous_batching(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            "generate_batch (continuous batching; use_transformers_continuous_batching of TRL) is not supported: each "
            "rank's own scheduler decides which forward passes it runs, and ranks that share experts have to run the "
            "same ones. Call generate(), or leave use_transformers_continuous_batching false."
        )

    return init_continuous_batching
