"""Tensor-parallel ranks must get the same loss, and the same gradient of what they hold alike, or the run stops."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_etp
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config, make_engine


def first_step_of_different_seeds(stage: int) -> str:
    """The error where tensor-parallel ranks start from weights of their own."""
    layout = Layout(world=4, tp=2, etp=2, stage=stage)
    recipe = Recipe(dp=2, seed=dist.get_rank() % 2)
    engine = make_engine(recipe, layout)
    loss = recipe.compute_loss(engine, recipe.batch(0, 0, dist.get_rank() // 2))
    with pytest.raises(ds_etp.ConfigError) as error:
        engine.backward(loss)
    engine.destroy()
    return str(error.value)


@pytest.mark.sample("0", "3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_different_seeds(launcher: Launcher, stage: int) -> None:
    """Losses differ; what may be wrong is named on every rank."""
    for message in launcher.run(4, first_step_of_different_seeds, stage=stage):
        assert "tensor_parallel.autotp_size=2" in message and "different seeds" in message


def loss_from_the_weight(model: Any, ids: Tensor) -> Tensor:
    """What a trainer does that computes a fused loss from hidden states, outside of the model's forward."""
    hidden, weight = model.module.model(ids).last_hidden_state, model.module.lm_head.weight
    logits = hidden @ weight.T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % len(weight))


def first_backward_of_a_fused_loss(frozen: str, stage: int) -> str:
    """The error; nothing is reduced by then."""
    layout = Layout(world=4, tp=2, etp=2, stage=stage)
    recipe = Recipe(dp=2, frozen=frozen)
    engine = make_engine(recipe, layout)
    ids = recipe.batch(0, 0, dist.get_rank() // 2)["input_ids"]
    recipe.compute_loss(engine, recipe.batch(0, 0, dist.get_rank() // 2))
    with pytest.raises(ds_etp.ConfigError) as error:
        engine.backward(loss_from_the_weight(engine, ids))
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    engine.destroy()
    return str(error.value)


@pytest.mark.parametrize("frozen", ["", "dense"])
def test_a_loss_from_a_split_weight(launcher: Launcher, frozen: str) -> None:
    """The likeliest cause comes first, and what works; also where nothing trains that ranks hold alike."""
    for message in launcher.run(4, first_backward_of_a_fused_loss, frozen=frozen, stage=1):
        assert message.index("lm_head.weight") < message.index("different seeds") < message.index("different batches")
        assert "expert_tensor_parallel.replicate_lm_head=true" in message


def first_step_without_norms_in_the_plan() -> str:
    """The error where the tp_plan doesn't name the norms over split heads, as that of transformers 5.0."""
    recipe, layout = Recipe(family="qwen3_moe", dp=2), Layout(world=4, tp=2, etp=2)
    ds_etp.register()
    model = recipe.model()
    plan = type(model.config).base_model_tp_plan
    model.config.base_model_tp_plan = {key: style for key, style in plan.items() if "_norm" not in key}
    model._tp_plan = {key: style for key, style in (model._tp_plan or {}).items() if "_norm" not in key}
    config = ds_config(recipe, layout)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    engine.backward(recipe.compute_loss(engine, recipe.batch(0, 0, dist.get_rank() // 2)))
    with pytest.raises(ds_etp.ConfigError) as error:
        engine.step()
    engine.destroy()
    return str(error.value)


def test_gradients_that_autotp_leaves_partial(launcher: Launcher) -> None:
    """Otherwise the losses fall, and the norms of two ranks drift apart."""
    for message in launcher.run(4, first_step_without_norms_in_the_plan):
        assert "self_attn.q_norm.weight" in message or "self_attn.k_norm.weight" in message
        assert "doesn't sum them" in message
