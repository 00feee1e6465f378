"""Sharded training equals unsharded training, over ZeRO stages, layouts, families and optimizers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, train
from tests.tolerances import assert_equal_runs

# (tp, etp, ep) on four ranks.
SPLITS = [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 4, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)]


# What `make compat` runs at the corners of the host range: ZeRO-3 with tp needs the newest DeepSpeed.
CORNER_CASES = {(stage, split) for stage in (1, 2) for split in [(1, 2, 2), (2, 2, 1), (2, 4, 1)]} | {(3, (1, 2, 2))}


def _cases() -> list[Any]:
    cases = []
    for stage in (0, 1, 2, 3):
        for split in SPLITS:
            marks = [pytest.mark.compat] if (stage, split) in CORNER_CASES else []
            cases.append(pytest.param(stage, split, id=f"{stage}-{'x'.join(map(str, split))}", marks=marks))
    return cases


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("stage", "split"), _cases())
def test_four_ranks(launcher: Launcher, stage: int, split: tuple[int, int, int], family: str, optimizer: str) -> None:
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    recipe = Recipe(family=family, optimizer=optimizer, dp=layout.dp)
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))
