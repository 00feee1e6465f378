"""Weights that tensor-parallel ranks hold alike must get the same gradient, or the run stops at its first step."""

from __future__ import annotations

import deepspeed
import pytest
import torch.distributed as dist

import ds_etp
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config, make_engine


def first_step_of_different_seeds(stage: int) -> str:
    """The error where tensor-parallel ranks start from weights of their own."""
    layout = Layout(world=4, tp=2, etp=2, stage=stage)
    recipe = Recipe(dp=2, seed=dist.get_rank() % 2)
    engine = make_engine(recipe, layout)
    engine.backward(recipe.compute_loss(engine, recipe.batch(0, 0, dist.get_rank() // 2)))
    with pytest.raises(ds_etp.ConfigError) as error:
        engine.step()
    engine.destroy()
    return str(error.value)


@pytest.mark.sample("0", "3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_different_seeds(launcher: Launcher, stage: int) -> None:
    """Named with a parameter and what may be wrong, on every rank."""
    for message in launcher.run(4, first_step_of_different_seeds, stage=stage):
        assert "tensor_parallel.autotp_size=2" in message and "different seeds" in message


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
