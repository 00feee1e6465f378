"""Sequences split over ranks and attention split over ranks, with experts split in a third way."""

from __future__ import annotations

import pytest

from tests.launcher import Launcher
from tests.oracle import train_unsharded
from tests.sequence.runs import Sequences, train
from tests.sharded import Layout
from tests.tolerances import assert_equal_runs

SPLITS = [(2, 1), (2, 2), (4, 1), (1, 2)]
QWEN = Sequences(family="qwen3_moe", optimizer="adamw", changes=(("output_router_logits", False),))


@pytest.mark.parametrize(("etp", "ep"), SPLITS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_sequence_over_four_ranks(launcher: Launcher, stage: int, etp: int, ep: int) -> None:
    """tp 2 x sp 2: every rank has half of the heads and half of the sequence."""
    recipe = Sequences() if (stage + etp) % 2 else QWEN
    layout = Layout(world=4, tp=2, sp=2, etp=etp, ep=ep, stage=stage)
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))
