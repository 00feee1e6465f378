"""Models of `ds_etp.from_pretrained` in the hands of Trainer and of PEFT: the numbers of the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import deepspeed
import pytest
import torch.distributed as dist

import ds_etp
from tests.launcher import Launcher
from tests.models import make_model
from tests.oracle import Run, train_unsharded
from tests.peft.models import BOTH, LoraRecipe
from tests.sharded import Layout, ds_config, full_tensors, run_steps, weight
from tests.tolerances import assert_equal_runs
from tests.trainer.runs import Job, Outcome, arguments, deepspeed_config, forget_host_state, outcome, run
from tests.trainer.test_trainer import assert_equal, plain

LIMIT = 240


def train_with_trainer(folder: str, job: Job, layout: Layout) -> Outcome | None:
    """Trainer's order: arguments first, which tell transformers of ZeRO-3, then the model."""
    try:
        keep = arguments(job, Path(folder), layout.dp, deepspeed_config(layout))
        model = ds_etp.from_pretrained(folder, deepspeed_config(layout))
        trainer = run(job, Path(folder), layout.dp, deepspeed_config(layout), model)
        del keep
        result = outcome(trainer)
        result.weights = full_tensors(trainer.deepspeed, weight)
        trainer.deepspeed.destroy()
        return result if dist.get_rank() == 0 else None
    finally:
        forget_host_state()


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [Layout(2, tp=2, etp=2), Layout(2, etp=2, stage=3)], ids=str)
def test_trainer(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    job = Job()
    make_model(job.family).save_pretrained(tmp_path)
    result = launcher.run(2, train_with_trainer, timeout=LIMIT, folder=str(tmp_path), job=job, layout=layout)[0]
    assert_equal(result, plain(job), evaluations=layout.dp == 1)


def train_adapters(folder: str, recipe: LoraRecipe, layout: Layout) -> Run | None:
    """LoRA on attention and on experts whose weights aren't there yet."""
    config = ds_config(recipe, layout)
    model = recipe.adapt(ds_etp.from_pretrained(folder, config, experts_implementation="eager"))
    model.enable_input_require_grads()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]
    result = run_steps(engine, recipe, layout)
    engine.destroy()
    return result if dist.get_rank() == 0 else None


@pytest.mark.sample(0)
@pytest.mark.parametrize("layout", [Layout(4, tp=2, etp=4), Layout(4, etp=2, stage=3)], ids=str)
def test_adapters(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    recipe = replace(BOTH, dp=layout.dp, steps=2)
    make_model(recipe.family, recipe.seed).save_pretrained(tmp_path)
    arguments = {"folder": str(tmp_path), "recipe": recipe, "layout": layout}
    assert_equal_runs(launcher.run(4, train_adapters, timeout=LIMIT, **arguments)[0], train_unsharded(recipe))
