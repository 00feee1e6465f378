"""An optimizer, and a scheduler, that the user made before `initialize`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_etp
from ds_etp.experts.sharded import expert_parameters
from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, ds_config, full_tensors, make_engine, run_steps, weight
from tests.tolerances import assert_equal_runs

LAYOUT = Layout(world=4, tp=2, etp=2, ep=2)


def _config(recipe: Recipe, stage: int) -> dict[str, Any]:
    config = ds_config(recipe, Layout(world=4, tp=2, etp=2, ep=2, stage=stage))
    del config["optimizer"]
    return config


def _decay_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, as most training scripts make them: norms don't decay."""
    decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": weight_decay}]


def train_with_client_optimizer(recipe: Recipe, stage: int, how: str) -> Any:
    """The recipe, with the optimizer made here: before the model is sharded, or by a callable after."""
    import deepspeed

    ds_etp.register()
    model = recipe.model().train()
    arguments: dict[str, Any] = {}
    if how == "groups":
        arguments["model_parameters"] = _decay_groups(model, 0.1)
    elif how == "callable":
        arguments["optimizer"] = recipe.make_optimizer
    else:
        arguments["optimizer"] = recipe.make_optimizer(_decay_groups(model, 0.1))
    config = _config(recipe, stage)
    if how == "groups":
        config["optimizer"] = recipe.optimizer_config()
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    run = run_steps(engine, recipe, LAYOUT)
    marked = [group for group in engine.basic_optimizer.param_groups if group.get("moe")]
    engine.destroy()
    return run, len(marked), {group["name"] for group in marked}


# Every way where each kind of optimizer is: none of ZeRO's, that of stages 1 and 2, which take turns, and ZeRO-3's.
WAYS = [
    *((stage, how) for stage in (0, 3) for how in ("groups", "callable", "object")),
    *((1, "groups"), (2, "callable"), (1, "object")),
]


@pytest.mark.sample("0-callable", "3-groups", "1-object")
@pytest.mark.parametrize(("stage", "how"), WAYS)
def test_trains_the_experts_in_groups_of_their_own(launcher: Launcher, stage: int, how: str) -> None:
    """Parity, with the experts' groups marked where ZeRO needs it."""
    recipe = Recipe(dp=2, optimizer="adamw")
    run, marked, names = launcher.run(4, train_with_client_optimizer, recipe=recipe, stage=stage, how=how)[0]
    assert_equal_runs(run, train_unsharded(recipe))
    # Without ZeRO no one asks for groups of experts, and the user's optimizer is stepped as it is.
    as_it_was = stage == 0 and how != "groups"
    assert (marked, names) == (0, set()) if as_it_was else (marked >= 1 and names == {"ep_size_4"})


def with_schedule(stage: int, passed: bool, factor: Callable[[int], float], decay: float, momentum: float) -> Any:
    """An engine, a schedule made before it, which the engine steps where it is passed, and one training step."""
    import deepspeed

    ds_etp.register()
    recipe = Recipe(dp=2)
    model = recipe.model().train()
    optimizer = torch.optim.SGD(_decay_groups(model, decay), lr=0.5, momentum=momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    arguments = {"lr_scheduler": schedule} if passed else {}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(recipe, stage), **arguments)

    def train(step: int) -> None:
        engine.backward(engine(**recipe.batch(step, 0, dist.get_rank() // 2)).loss)
        engine.step()
        if not passed:
            schedule.step()

    return engine, schedule, train


def train_with_schedule(stage: int, passed: bool) -> Any:
    """Trains with a schedule that ends at rate zero, and returns how far experts and others move after that."""
    engine, _, train = with_schedule(stage, passed, lambda step: 1.0 if step < 2 else 0.0, 0.0, 0.0)
    experts = {name for name, _ in expert_parameters(engine.module)}
    history = [full_tensors(engine, weight)]
    for step in range(3):
        train(step)
        history.append(full_tensors(engine, weight))
    engine.destroy()
    moved = [
        {name: not torch.equal(before[name], after[name]) for name in before}
        for before, after in itertools.pairwise(history)
    ]
    return [{kind: any(m[n] for n in m if (n in experts) == kind) for kind in (True, False)} for m in moved]


@pytest.mark.sample("0-script steps it", "3-engine steps it")
@pytest.mark.parametrize("passed", [True, False], ids=["engine steps it", "script steps it"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_schedule_made_before_reaches_the_experts(launcher: Launcher, stage: int, passed: bool) -> None:
    """The schedule knows two groups; the experts' groups, made later, follow the ones they came from."""
    moved = launcher.run(4, train_with_schedule, stage=stage, passed=passed)[0]
    assert moved[0] == {True: True, False: True}
    assert moved[-1] == {True: False, False: False}, "rate zero, and something still moved"


def train_and_resume(stage: int, passed: bool, folder: str) -> list[str]:
    """Four steps under a schedule made before, in one go and with a checkpoint between; tensors that differ."""
    engine, schedule, train = with_schedule(stage, passed, lambda step: 0.5**step, 0.1, 0.9)
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(folder)
            stored = schedule.state_dict()
        train(step)
    wanted = full_tensors(engine, weight)
    engine.destroy()
    engine, schedule, train = with_schedule(stage, passed, lambda step: 0.5**step, 0.1, 0.9)
    engine.load_checkpoint(folder)
    if not passed:
        schedule.load_state_dict(stored)
    for step in range(2, 4):
        train(step)
    found = full_tensors(engine, weight)
    engine.destroy()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.sample("1-script steps it", "3-engine steps it")
@pytest.mark.parametrize("passed", [True, False], ids=["engine steps it", "script steps it"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_schedule_made_before_goes_on_after_a_resume(
    launcher: Launcher, stage: int, passed: bool, tmp_path: Path
) -> None:
    """What the schedule has set after the last step is saved for the experts too: the same bits as without a stop."""
    differing = launcher.run(4, train_and_resume, stage=stage, passed=passed, folder=str(tmp_path))
    assert differing == [[]] * 4


def states_of_experts(stage: int) -> int:
    """How many expert parameters give their full optimizer state after one step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = make_engine(Recipe(dp=2, optimizer="adamw"), Layout(world=4, tp=2, etp=2, ep=2, stage=stage))
    engine.backward(engine(**Recipe().batch(0, 0, dist.get_rank() // 2)).loss)
    engine.step()
    found = 0
    for _, parameter in expert_parameters(engine.module):
        state = safe_get_full_optimizer_state(parameter, "exp_avg_sq")
        found += state is not None and bool((state > 0).any())
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_states_of_experts_can_be_read(launcher: Launcher, stage: int) -> None:
    """Two layers of two expert parameters each."""
    assert launcher.run(4, states_of_experts, stage=stage) == [4] * 4
