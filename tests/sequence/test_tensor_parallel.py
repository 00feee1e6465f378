"""Sequences split over ranks and attention split over ranks, with experts split in a third way."""

from __future__ import annotations

import pytest

from tests.launcher import Launcher
from tests.oracle import train_unsharded
from tests.sequence.runs import Sequences, train
from tests.sharded import Layout
from tests.tolerances import assert_equal_runs

# (stage, etp, ep): every stage and every split, in part of their combinations.
CASES = [(0, 2, 1), (0, 4, 1), (1, 2, 2), (1, 1, 2), (2, 4, 1), (2, 2, 1), (3, 2, 2), (3, 1, 2), (3, 4, 1)]
QWEN = Sequences(family="qwen3_moe", optimizer="adamw", changes=(("output_router_logits", False),))


def _assert_parity(launcher: Launcher, recipe: Sequences, layout: Layout) -> None:
    run = launcher.run(layout.world, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


@pytest.mark.sample("0-4-1", "1-2-2", "3-1-2")
@pytest.mark.parametrize(("stage", "etp", "ep"), CASES)
def test_one_sequence_over_four_ranks(launcher: Launcher, stage: int, etp: int, ep: int) -> None:
    """tp 2 x sp 2: every rank has half of the heads and half of the sequence."""
    recipe = Sequences() if etp > ep else QWEN
    layout = Layout(world=4, tp=2, sp=2, etp=etp, ep=ep, stage=stage)
    _assert_parity(launcher, recipe, layout)


@pytest.mark.full
def test_two_sequences_over_eight_ranks(launcher: Launcher) -> None:
    """tp 2 x sp 2 x dp 2, and key and value heads that ranks of a sequence have copies of."""
    heads = (("num_attention_heads", 8), ("num_key_value_heads", 2), ("output_router_logits", False))
    recipe = Sequences(family="qwen3_moe", dp=2, changes=heads)
    _assert_parity(launcher, recipe, Layout(world=8, tp=2, sp=2, etp=4, ep=2, stage=2))


def test_built_under_zero_init(launcher: Launcher) -> None:
    _assert_parity(launcher, QWEN, Layout(world=4, tp=2, sp=2, etp=2, ep=2, stage=3, zero_init=True))
