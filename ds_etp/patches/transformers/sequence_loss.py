"""Trainer's loss under sequence parallelism, where ranks backpropagate their own part of it (transformers 5.25 on).

Up to 5.24 `deepspeed_sp_compute_loss` gathers the losses of a sequence's parts with a differentiable collective, so
that each part gets the gradient of the whole loss sp times: `patches.deepspeed.ulysses` averages gradients over all
ranks for that. From 5.25 on it backpropagates a rank's own part, times sp where it takes DeepSpeed to average (ZeRO-3
before DeepSpeed 0.20.2). With split experts gradients are averaged at all stages, so the factor is sp at all of them;
without it gradients would be sp times too small at stages 0 to 2. Can go together with the corrections of `ulysses`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.integrations import deepspeed as host

from ds_etp.patches.base import MethodPatch, swapped
from ds_etp.patches.versions import has_own_share_loss

_NAME = "deepspeed_sp_compute_loss"


def install_sequence_loss() -> None:
    """Lets Trainer's loss of a shared sequence have the gradient that engines with split experts are made for.

    Does nothing where Trainer isn't in use, or has another loss than transformers' own. The patch stays when ds_etp is
    unregistered, since engines made before stay split; it does nothing for others.
    """
    trainer: Any = sys.modules.get("transformers.trainer")
    if trainer is not None and has_own_share_loss() and vars(trainer).get(_NAME) is getattr(host, _NAME, None):
        MethodPatch(trainer, _NAME, _times_sequence_size).apply()


def _times_sequence_size(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepspeed_sp_compute_loss(accelerator: Any, model: Any, inputs: Any, return_outputs: bool, pc: Any) -> Any:
        if "ds_etp" not in vars(model):
            return original(accelerator, model, inputs, return_outputs, pc)
        # What it looks at for its own factor, at any release of DeepSpeed.
        with swapped(host, "is_deepspeed_zero3_enabled", lambda _: lambda: False):
            found = original(accelerator, model, inputs, return_outputs, pc)
        loss, outputs = found if return_outputs else (found, None)
        loss = _scale_gradient(loss, pc.sp_size)
        return (loss, outputs) if return_outputs else loss

    return deepspeed_sp_compute_loss


def _scale_gradient(loss: Tensor, factor: int) -> Tensor:
    """The same value, and the gradient times a factor."""
    return loss + (factor - 1) * (loss - loss.detach())
