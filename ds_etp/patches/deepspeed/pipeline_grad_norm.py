"""The gradient norm over pipeline stages that differ in what they hold.

DeepSpeed (0.19.8) sums over the stages once for each of an optimizer's groups. A stage without experts has fewer
groups, so that its ranks would add up other numbers, or wait for ever. Can go when it sums a rank's groups first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_etp.parallel.process_groups import ExpertGroups
from ds_etp.patches.base import override


def fix_pipeline_grad_norm(engine: Any, groups: ExpertGroups) -> None:
    """Corrects the optimizer that the engine has just built. Stage 0 in fp32 has none; see `patches.optimizers`."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        _reduce_norm_over_pp(engine.optimizer, groups, engine.device)
    elif isinstance(engine.optimizer, BF16_Optimizer):
        _pad_empty_norm_groups(engine.optimizer, groups)


def _reduce_norm_over_pp(optimizer: Any, groups: ExpertGroups, device: torch.device) -> None:
    """ZeRO-1: the norm of a stage, then of all of them."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def scaled_global_norm(*args: Any, **kwargs: Any) -> Any:
            across, optimizer.model_parallel_group = optimizer.model_parallel_group, groups.tp.group
            try:
                norm = original(*args, **kwargs)
            finally:
                optimizer.model_parallel_group = across
            square = norm.to(device).square()
            dist.all_reduce(square, group=groups.pp.group)
            return square.sqrt().to(norm.device)

        return scaled_global_norm

    override(optimizer, "scaled_global_norm", make)


def _pad_empty_norm_groups(optimizer: Any, groups: ExpertGroups) -> None:
    """BF16_Optimizer: every stage has gradients to count of both kinds, if only a zero."""
    nothing = [torch.zeros(1, device=group.device) for group in optimizer.bf16_groups_flat[:1]]
    if not optimizer.has_moe_layers:
        optimizer.has_moe_layers, optimizer.expert_gradients = True, {}

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_grads_for_norm(for_clipping: bool = False) -> Any:
            if for_clipping:
                return original(for_clipping)
            dense, experts = original()
            return dense or nothing, {groups.name: experts.get(groups.name) or nothing}

        return get_grads_for_norm

    override(optimizer, "get_grads_for_norm", make)
