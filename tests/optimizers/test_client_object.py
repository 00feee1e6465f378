"""The optimizer object that the user made and kept: it does to the experts what it does to all parameters."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_etp
from ds_etp.experts.sharded import expert_parameters
from tests.launcher import Launcher
from tests.optimizers.schedule_free import ScheduleFree
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config, full_tensors, weight
from tests.tolerances import TENSOR

RECIPE = Recipe(dp=2, clip=0.0)
LAYOUT = Layout(world=4, tp=2, etp=2, ep=2)


def _engine(optimizer: Any, model: Any, stage: int, **arguments: Any) -> Any:
    ds_etp.register()
    config = ds_config(RECIPE, Layout(world=4, tp=2, etp=2, ep=2, stage=stage))
    config["expert_tensor_parallel"]["allow_optimizer"] = True
    del config["optimizer"]
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **arguments)[0]


def _train(engine: Any, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(**RECIPE.batch(step, 0, dist.get_rank() // 2)).loss)
        engine.step()


def _in_one_process(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights while training, and as evaluated."""
    model = RECIPE.model().train()
    optimizer = ScheduleFree(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for data_rank in range(RECIPE.dp):
            (RECIPE.compute_loss(model, RECIPE.batch(step, 0, data_rank)) / RECIPE.dp).backward()
        optimizer.step()
    training = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.eval()
    return training, {name: p.detach().clone() for name, p in model.named_parameters()}


def schedule_free(stage: int) -> Any:
    """Master weights after training, after `eval()`, and after `train()` again, of the object made before."""
    model = RECIPE.model().train()
    optimizer = ScheduleFree(model.parameters())
    engine = _engine(optimizer, model, stage)
    _train(engine, 3)
    seen = [full_tensors(engine, weight)]
    optimizer.eval()
    seen.append(full_tensors(engine, weight))
    optimizer.train()
    seen.append(full_tensors(engine, weight))
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_eval_and_train_of_a_schedule_free_optimizer(launcher: Launcher, stage: int) -> None:
    """At stage 0 those are the model's weights; ZeRO has masters of its own, in plain DeepSpeed too."""
    training, evaluated = _in_one_process(3)
    seen = launcher.run(4, schedule_free, stage=stage)[0]
    for got, wanted in zip(seen, (training, evaluated, training), strict=True):
        for name, reference in wanted.items():
            error = ((got[name] - reference).abs().max() / reference.abs().max()).item()
            assert error <= TENSOR, f"{name} is off by {error:.1e}"
    assert all((training[name] - evaluated[name]).abs().max() > 1e-4 for name in training if "experts" in name)


def the_object(stage: int) -> Any:
    """What one sees through the user's own object, beside what the engine steps."""
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
    stepped = engine.basic_optimizer
    found: dict[str, Any] = {"same": stepped is optimizer, "kind": isinstance(optimizer, torch.optim.SGD)}
    found["lrs"] = [group["lr"] for group in optimizer.param_groups]
    saved = optimizer.state_dict()
    found["groups"] = len(saved["param_groups"])
    entries = sum(len(group["params"]) for group in stepped.param_groups)
    found["states"] = (len(saved["state"]), len(stepped.state), entries if stage == 0 else len(stepped.state))
    for state in saved["state"].values():
        state["momentum_buffer"] = torch.full_like(state["momentum_buffer"], 0.25)
    for group in saved["param_groups"]:
        group["momentum"] = 0.75
    optimizer.load_state_dict(saved)
    found["loaded"] = all(bool((state["momentum_buffer"] == 0.25).all()) for state in stepped.state.values())
    found["loaded"] &= {group["momentum"] for group in stepped.param_groups} == {0.75}
    for group in optimizer.param_groups:  # and what is set on the object reaches the experts' groups
        group["lr"] = 0.0
    if stage == 0:
        for parameter in engine.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad()
        found["zeroed"] = all(parameter.grad is None for parameter in engine.module.parameters())
    before = {name: p.clone() for name, p in full_tensors(engine, weight).items()}
    _train(engine, 1)
    after = full_tensors(engine, weight)
    found["stopped"] = all(torch.equal(before[name], after[name]) for name in before)
    found["experts"] = len(list(expert_parameters(engine.module)))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_object_sees_the_experts(launcher: Launcher, stage: int) -> None:
    """`state_dict`, `load_state_dict`, `zero_grad` and groups; with a schedule that was made before."""
    found = launcher.run(4, the_object, stage=stage)[0]
    assert found["same"] == (stage == 0) and found["kind"]
    assert found["lrs"] == [0.1, 0.2, 0.1]  # its own groups, in their order
    assert found["groups"] == (3 if stage == 0 else 4)
    assert len(set(found["states"])) == 1
    assert found["loaded"] and found["stopped"] and found.get("zeroed", True)
