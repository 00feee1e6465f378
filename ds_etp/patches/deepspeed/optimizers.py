"""DeepSpeed's optimizers, corrected for parameters that differ between ranks. All on one engine.

Each correction names the fault in deepspeed 0.19.8 it makes good; it can go when that is mended upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_etp.parallel.process_groups import ExpertGroups
from ds_etp.patches.base import override
from ds_etp.patches.deepspeed.client_optimizer import accept_named_optimizer, accept_optimizer, split_param_groups
from ds_etp.patches.deepspeed.muon import mark_masters
from ds_etp.patches.deepspeed.pipeline_grad_norm import fix_pipeline_grad_norm
from ds_etp.patches.deepspeed.ulysses import fix_zero_grad_scale
from ds_etp.patches.deepspeed.zero_params import global_grad_norm


def prepare_optimizer(engine: Any, client_optimizer: Any, model_parameters: Any) -> tuple[Any, Any]:
    """What `_configure_optimizer` is given instead, whoever makes the optimizer. In this order:

    1. Its kind: one that needs whole tensors is refused, before it is built where that can be known.
    2. Muon's marks, before ZeRO reads them off the parameters.
    3. Expert parameters in groups marked `moe`. DeepSpeed makes them only for a plain list of parameters. Groups that
       a caller passes, and the groups of a client optimizer, reach ZeRO-1/2 unsplit, which assert.
    4. Whether the engine has experts to train, by those groups.

    Raises:
        ConfigError: the optimizer's step doesn't fit split experts.
    """

    def expect_experts(groups: list[Any]) -> None:
        # DeepSpeed asserts that a model with MoE layers has groups of them, which frozen experts haven't. They ask
        # for no special care then; ZeRO-3 still has to know how they are partitioned.
        parameters = chain.from_iterable(group["params"] if isinstance(group, dict) else [group] for group in groups)
        if engine.zero_optimization_stage() != 3:
            engine.has_moe_layers = any(is_moe_param(parameter) for parameter in parameters)

    def accepted(optimizer: Any) -> Any:
        optimizer = accept_optimizer(engine, optimizer)
        expect_experts(optimizer.param_groups)
        return optimizer

    if client_optimizer is None:
        accept_named_optimizer(engine)
        if model_parameters and isinstance(model_parameters[0], dict):
            groups = [{**group, "params": _as_list(group["params"])} for group in model_parameters]
            model_parameters = split_param_groups(groups)
        expect_experts(model_parameters)
        return None, model_parameters
    if hasattr(client_optimizer, "param_groups"):
        return accepted(client_optimizer), model_parameters
    return (lambda parameters: accepted(client_optimizer(parameters))), model_parameters


def _as_list(parameters: Any) -> list[Any]:
    return list(parameters) if not hasattr(parameters, "data") else [parameters]


def patch_optimizer(engine: Any, groups: ExpertGroups) -> None:
    """Corrects the optimizer that the engine has just built, by what it turned out to be. In this order:"""
    optimizer, topology = engine.optimizer, groups.topology
    # 1. Optimizer states: independent of what follows.
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        _link_states_after_all_groups(optimizer)
    # 2. Muon's marks on the parameters that are stepped: the norm, which comes next, doesn't read them.
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        mark_masters(optimizer)
    # 3. The gradient norm of one pipeline stage: experts count in it.
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        _count_experts_in_unfused_norm(optimizer, groups)
    elif engine.zero_optimization_stage() == 0 and not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        fix_stage0_grad_norm(engine, groups)
    # 4. The norm over all pipeline stages: around that of one.
    if topology.pp > 1:
        fix_pipeline_grad_norm(engine, groups)
    # 5. The divisor of gradients, a number that nothing above reads.
    if topology.cp > 1:
        fix_zero_grad_scale(engine)


def _link_states_after_all_groups(optimizer: Any) -> None:
    """ZeRO-1/2 link optimizer states to parameters after stepping the first group, and never again.

    Experts are in later groups, so `safe_get_full_optimizer_state` finds nothing for them.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _lazy_init_hp_params_optimizer_state() -> None:
            stepped = [bool(optimizer.optimizer.state.get(flat)) for flat in optimizer.single_partition_of_fp32_groups]
            if all(stepped) or not any(stepped):
                original()

        return _lazy_init_hp_params_optimizer_state

    override(optimizer, "_lazy_init_hp_params_optimizer_state", make)


def _count_experts_in_unfused_norm(optimizer: Any, groups: ExpertGroups) -> None:
    """Stage 0 in bf16 or fp16, unfused: the norm leaves expert gradients out, and clips by what is left."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_and_clip_grads(total_norm: Any, apply_scale: bool = True) -> Any:
            parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
            scaled_norm = global_grad_norm(parameters, groups)
            optimizer._global_grad_norm = scaled_norm / optimizer.loss_scale_config.cur_scale
            return original(scaled_norm, apply_scale)

        return unscale_and_clip_grads

    override(optimizer, "unscale_and_clip_grads", make)


def fix_stage0_grad_norm(engine: Any, groups: ExpertGroups) -> None:
    """Stage 0 in fp32: clips by the norm of the whole model's gradients, and reports it.

    DeepSpeed averages the ranks' norms over the data-parallel group, which is not the norm once experts
    differ between ranks, and `get_global_grad_norm()` is None.
    """

    def clip(_: Callable[..., Any]) -> Callable[..., Any]:
        def clip_fp32_gradients() -> None:
            norm = global_grad_norm(engine.module.parameters(), groups)
            engine._global_grad_norm = norm
            # The rule of torch.nn.utils.clip_grad_norm_, on the device: no host sync.
            factor = (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.dtype))

        return clip_fp32_gradients

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def _take_model_step(*args: Any, **kwargs: Any) -> Any:
            if not engine.gradient_clipping():
                engine._global_grad_norm = global_grad_norm(engine.module.parameters(), groups)
            return original(*args, **kwargs)

        return _take_model_step

    override(engine, "clip_fp32_gradients", clip)
    override(engine, "_take_model_step", step)
