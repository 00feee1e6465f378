"""A run with split sequences goes on from its checkpoint, with the sequences split or whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher import Launcher
from tests.oracle import train_unsharded
from tests.sequence.runs import Sequences, go_on, save_half_way
from tests.sharded import Layout
from tests.tolerances import LOSS, NORM

HALF = 2
RECIPE = Sequences(optimizer="adamw", dp=2, steps=2 * HALF)
SPLIT = Layout(world=4, sp=2, etp=2, ep=2, stage=1)


@pytest.mark.sample("split to whole")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SPLIT, Layout(world=4, sp=2, etp=4, stage=3)),
        (SPLIT, Layout(world=2, etp=2, stage=2)),
        (Layout(world=2, ep=2, stage=3), SPLIT),
    ],
    ids=["split", "split to whole", "whole to split"],
)
def test_goes_on(launcher: Launcher, tmp_path: Path, before: Layout, after: Layout) -> None:
    launcher.run(before.world, save_half_way, recipe=RECIPE, layout=before, folder=str(tmp_path), steps=HALF)
    run = launcher.run(after.world, go_on, recipe=RECIPE, layout=after, folder=str(tmp_path), steps=HALF)[0]
    oracle = train_unsharded(RECIPE)
    assert run.losses == pytest.approx(oracle.losses[HALF:], rel=LOSS)
    assert run.norms == pytest.approx(oracle.norms[HALF:], rel=NORM)
