"""Sharded training equals unsharded training, over ZeRO stages, layouts, families and optimizers."""

from __future__ import annotations

import pytest

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, train
from tests.tolerances import assert_equal_runs

# (tp, etp, ep) on four ranks.
SPLITS = [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 4, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "x".join(map(str, split)))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_ranks(launcher: Launcher, stage: int, split: tuple[int, int, int], family: str, optimizer: str) -> None:
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    recipe = Recipe(family=family, optimizer=optimizer, dp=layout.dp)
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))
