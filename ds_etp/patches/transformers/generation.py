"""Synchronized generation: `generate()` runs until all ranks are done, where expert ranks hold different prompts.

Each forward of a layer is collective over its expert group. transformers (5.0 to 5.24) syncs generation only
where it knows of ZeRO-3 or FSDP, so a rank whose prompts are done would leave its peers waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GenerationMixin

from ds_etp.patches.base import override


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
