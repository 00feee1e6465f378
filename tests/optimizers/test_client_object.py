"""The optimizer object that the user made and kept: what plain DeepSpeed shows through it, ds_etp shows too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_etp
from tests.launcher import Launcher
from tests.optimizers.schedule_free import ScheduleFree
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config, full_tensors, weight
from tests.tolerances import TENSOR

RECIPE = Recipe(dp=2, clip=0.0)
STAGES = (0, 1, 2, 3)


def _engine(optimizer: Any, model: Any, stage: int) -> Any:
    """On four ranks with ds_etp: two batches, experts split both ways. On two ranks: plain DeepSpeed, two batches."""
    ds_etp.register()
    if dist.get_world_size() == 4:
        layout = Layout(world=4, tp=2, etp=2, ep=2, stage=stage)
    else:
        layout = Layout(world=2, stage=stage, with_block=False)
    config = ds_config(RECIPE, layout)
    del config["optimizer"]
    config.get("expert_tensor_parallel", {})["allow_optimizer"] = True
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _train(engine: Any, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(**RECIPE.batch(step, 0, dist.get_rank() * 2 // dist.get_world_size())).loss)
        engine.step()


def _outcome(do: Callable[[], Any]) -> str:
    try:
        do()
    except Exception as error:
        return type(error).__name__
    return "done"


def _assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, reference in wanted.items():
        error = ((got[name] - reference).abs().max() / reference.abs().max()).item()
        assert error <= TENSOR, f"{name} is off by {error:.1e}"


def schedule_free(stage: int) -> Any:
    """Weights after training, after `eval()`, after `train()` and after more training, by the object made before."""
    model = RECIPE.model().train()
    optimizer = ScheduleFree(model.parameters())
    engine = _engine(optimizer, model, stage)
    seen = []
    for do in (lambda: _train(engine, 3), optimizer.eval, optimizer.train, lambda: _train(engine, 2)):
        do()
        seen.append(full_tensors(engine, weight))
    engine.destroy()
    return seen


@pytest.mark.sample("1", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_eval_and_train_of_a_schedule_free_optimizer(launcher: Launcher, stage: int) -> None:
    """What they do to masters. At ZeRO-3 that is nothing, in plain DeepSpeed too: groups are empty between steps."""
    wanted = launcher.run(2, schedule_free, stage=stage)[0]
    got = launcher.run(4, schedule_free, stage=stage)[0]
    for one, other in zip(got, wanted, strict=True):
        _assert_same(one, other)
    trained, evaluated, _, last = wanted
    for name, before in trained.items():
        assert not torch.equal(before, last[name])
        assert torch.equal(before, evaluated[name]) == (stage == 3)


def the_object(stage: int) -> dict[str, Any]:
    """What one sees and does through the user's own object."""
    model = RECIPE.model().train()
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    # One group of both kinds, one of experts alone, one of neither.
    optimizer = torch.optim.SGD(
        [{"params": [dense[0], experts[0]]}, {"params": experts[1:], "lr": 0.2}, {"params": dense[1:]}],
        lr=0.1,
        momentum=0.9,
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine = _engine(optimizer, model, stage)
    _train(engine, 2)
    found: dict[str, Any] = {"stepped": engine.basic_optimizer is optimizer}
    found["lrs"] = [group["lr"] for group in optimizer.param_groups]
    found["state_dict"] = _outcome(optimizer.state_dict)
    if found["state_dict"] == "done":
        saved = optimizer.state_dict()
        # Every parameter, or flat partition, that the optimizer steps has its momentum in there.
        found["whole"] = len(saved["state"]) == sum(len(group["params"]) for group in saved["param_groups"])
        for state in saved["state"].values():
            state["momentum_buffer"] = state["momentum_buffer"] * 0.5
        for group in saved["param_groups"]:
            group["momentum"] = 0.75
        optimizer.load_state_dict(saved)
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()
    found["zeroed"] = [parameter.grad is None for parameter in engine.module.parameters()].count(True) > 0
    found["cleared"] = all(parameter.grad is None for parameter in engine.module.parameters())
    engine.module.zero_grad()
    _train(engine, 1)
    found["weights"] = full_tensors(engine, weight)
    for group in optimizer.param_groups:  # what is set on the object reaches experts too
        group["lr"] = 0.0
    _train(engine, 1)
    found["stopped"] = full_tensors(engine, weight)
    engine.destroy()
    return found


@pytest.mark.sample("0", "2")
@pytest.mark.parametrize("stage", STAGES)
def test_the_object_sees_the_experts(launcher: Launcher, stage: int) -> None:
    """State dicts out and in, `zero_grad()` and groups; with a schedule that was made before."""
    wanted = launcher.run(2, the_object, stage=stage)[0]
    got = launcher.run(4, the_object, stage=stage)[0]
    # ZeRO wants groups of experts, and then another object steps; what the user's shows is the same.
    assert wanted.pop("stepped") and got.pop("stepped") == (stage == 0)
    for key in ("weights", "stopped"):
        _assert_same(got.pop(key), values := wanted.pop(key))
        if key == "weights":
            weights = values
    assert all(torch.equal(weights[name], value) for name, value in values.items())
    assert got == wanted
