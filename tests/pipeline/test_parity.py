"""A pipeline with split experts trains as the unsharded model does."""

from __future__ import annotations

import pytest

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.pipeline.runs import Pipeline, train
from tests.sharded import Layout
from tests.tolerances import assert_equal_runs

# A pipeline's layers pass on rows alone, not router logits.
PLAIN = (("output_router_logits", False),)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_four_ranks(launcher: Launcher, stage: int, optimizer: str) -> None:
    pipeline = Pipeline(Layout(world=4, etp=2, stage=stage))
    recipe = Recipe(optimizer=optimizer, dp=pipeline.dp, accumulate=2, changes=PLAIN)
    run = launcher.run(4, train, recipe=recipe, pipeline=pipeline)[0]
    assert_equal_runs(run, train_unsharded(recipe))
