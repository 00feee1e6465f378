"""Training on split sequences equals training on whole ones, over ZeRO stages and layouts of the experts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.hosts import needs_sequences
from tests.launcher import Launcher
from tests.oracle import train_unsharded
from tests.sequence.runs import Sequences, train
from tests.sharded import Layout
from tests.tolerances import assert_equal_runs

# (etp, ep) on four ranks: two sequences, each over two ranks.
SPLITS = [(2, 1), (2, 2), (1, 2), (4, 1)]
HEAD_DIM = (("output_router_logits", False),)  # Qwen3's config has its head_dim


def _cases() -> list[Any]:
    cases = []
    for place, (stage, (etp, ep)) in enumerate(itertools.product((0, 1, 2, 3), SPLITS)):
        # SGD shows a wrong scale, AdamW a wrong state. Every stage and every split meets both.
        other = (place + stage) % 2 == 1
        recipe = Sequences(family="qwen3_moe", optimizer="adamw", changes=HEAD_DIM) if other else Sequences()
        # torch's all-to-all and transformers' attention, at their oldest and newest.
        marks = [pytest.mark.compat] if (stage, etp, ep) in ((1, 2, 2), (3, 2, 1)) else []
        cases.append(pytest.param(stage, etp, ep, recipe, id=f"{stage}-{etp}x{ep}-{recipe.family}", marks=marks))
    return cases


def _assert_parity(launcher: Launcher, recipe: Sequences, layout: Layout) -> None:
    run = launcher.run(layout.world, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


@needs_sequences
@pytest.mark.sample("0-4x1-qwen3_moe", "1-2x2-mixtral", "2-1x2-mixtral", "3-2x1-qwen3_moe")
@pytest.mark.parametrize(("stage", "etp", "ep", "recipe"), _cases())
def test_two_sequences_over_four_ranks(launcher: Launcher, stage: int, etp: int, ep: int, recipe: Sequences) -> None:
    """Losses, norms, gradients and weights, with a clip that always bites."""
    layout = Layout(world=4, sp=2, etp=etp, ep=ep, stage=stage)
    _assert_parity(launcher, replace(recipe, dp=layout.dp), layout)


SETTINGS: dict[str, tuple[Sequences, Layout]] = {
    "one sequence over all ranks": (Sequences(), Layout(world=4, sp=4, etp=2, ep=2, stage=2)),
    "sequences of different length": (Sequences(dp=2, lengths=(8, 20)), Layout(world=4, sp=2, etp=4, stage=1)),
    "a part without labels": (Sequences(dp=2, unlabelled=8), Layout(world=4, sp=2, etp=2, ep=2, stage=3)),
    "accumulation": (Sequences(accumulate=2), Layout(world=2, sp=2, etp=2, stage=2)),
    "accumulation, stage 0": (Sequences(accumulate=2), Layout(world=2, sp=2, etp=2, stage=0)),
    "no clipping, stage 0": (Sequences(clip=0.0), Layout(world=2, sp=2, ep=2, stage=0)),
    "built under zero.Init": (Sequences(), Layout(world=2, sp=2, etp=2, stage=3, zero_init=True)),
    "no reduce_scatter, stage 3": (
        Sequences(),
        Layout(world=2, sp=2, etp=2, stage=3, extra=(("zero_optimization", {"reduce_scatter": False}),)),
    ),
    "checkpointing": (Sequences(checkpointing="plain"), Layout(world=2, sp=2, ep=2, stage=3)),
    "alltoall": (Sequences(), Layout(world=4, sp=4, etp=2, ep=2, stage=1, dispatcher="alltoall")),
    "alltoall_etp_first": (Sequences(), Layout(world=4, sp=4, etp=2, ep=2, stage=1, dispatcher="alltoall_etp_first")),
    "experts whole": (Sequences(dp=2), Layout(world=4, sp=2, stage=0)),
}


@pytest.mark.sample(
    "one sequence over all ranks",
    "sequences of different length",
    "a part without labels",
    "accumulation, stage 0",
    "built under zero.Init",
    "checkpointing",
    "alltoall_etp_first",
)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(launcher: Launcher, name: str) -> None:
    _assert_parity(launcher, *SETTINGS[name])
