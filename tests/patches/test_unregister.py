"""`unregister()` where another library has wrapped a method of the engine in the meantime."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import ds_etp
from ds_etp.experts.sharded import expert_parameters
from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, ds_config, make_engine, run_steps
from tests.tolerances import assert_equal_runs

LAYOUT = Layout(world=2, etp=2, stage=1)


def train_beside_another_library(recipe: Recipe, registered: bool) -> Any:
    """Wraps as profilers do, unregisters, perhaps registers again; trains, and returns what was found."""
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    ds_etp.register()
    below = vars(DeepSpeedEngine)["_configure_distributed_model"]
    calls: list[str] = []

    @functools.wraps(below)
    def theirs(self: Any, model: Any) -> Any:
        calls.append("theirs")
        return below(self, model)

    DeepSpeedEngine._configure_distributed_model = theirs
    try:
        ds_etp.unregister()
        stays = vars(DeepSpeedEngine)["_configure_distributed_model"] is theirs
        if registered:
            engine = make_engine(recipe, LAYOUT)  # registers
        else:
            engine, *_ = deepspeed.initialize(model=recipe.model().train(), config=ds_config(recipe, LAYOUT))
        whole = not any(True for _ in expert_parameters(engine.module))
        stays = stays and vars(DeepSpeedEngine)["_configure_distributed_model"] is theirs
        run = run_steps(engine, recipe, LAYOUT)
        engine.destroy()
    finally:
        DeepSpeedEngine._configure_distributed_model = below
        ds_etp.unregister()
    clean = not hasattr(vars(DeepSpeedEngine)["_configure_distributed_model"], "__ds_etp_patch__")
    return run, whole, stays, clean, calls


@pytest.mark.parametrize("registered", [False, True], ids=["unregistered", "registered again"])
def test_their_wrapper_stays_and_ours_sleeps(launcher: Launcher, registered: bool) -> None:
    """Plain data parallelism without ds_etp, split experts with it: both are the unsharded run."""
    recipe = Recipe(dp=2)
    for run, whole, stays, clean, calls in launcher.run(
        2, train_beside_another_library, recipe=recipe, registered=registered
    )[:1]:
        assert stays and clean and calls == ["theirs"]
        assert whole is not registered
        assert_equal_runs(run, train_unsharded(recipe))
