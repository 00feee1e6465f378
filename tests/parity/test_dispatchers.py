"""Training under every dispatcher equals unsharded training: uneven batches, none at all, one expert for everybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, train
from tests.tolerances import assert_equal_runs

# (dispatcher, (tp, etp, ep)) on four ranks: each dispatcher where its messages differ.
PLACES = [
    ("replicated", (4, 1, 4)),
    ("allgather", (1, 2, 2)),
    ("allgather", (2, 1, 4)),
    ("alltoall", (1, 1, 4)),
    ("alltoall", (1, 2, 2)),
    ("alltoall", (2, 2, 2)),
    ("alltoall", (4, 2, 2)),
    ("alltoall", (4, 1, 2)),
    ("alltoall_etp_first", (1, 2, 2)),
    ("alltoall_etp_first", (2, 2, 2)),
    ("alltoall_etp_first", (2, 4, 1)),
    ("alltoall_etp_first", (4, 2, 2)),
]
ONE_EXPERT = (("num_experts_per_tok", 1),)
RECIPES = {
    "uneven": Recipe(accumulate=2, lengths=(12, 5, 9, 3), steps=2),
    # Not Mixtral, which divides a single weight by itself: its router's gradient is all rounding.
    "one expert a token": Recipe(
        family="qwen3_moe", changes=(*ONE_EXPERT, ("norm_topk_prob", False)), steps=2, checkpointing="reentrant"
    ),
    "all to one expert": Recipe(changes=ONE_EXPERT, pinned=(3,), steps=2),
    "one token": Recipe(rows=1, lengths=(1,), loss="logits", steps=2),
}


# Everywhere uneven batches and the fewest tokens there can be; the other two take turns.
CASES = [
    (place, case)
    for number, place in enumerate(PLACES)
    for case in ("uneven", "one token", ("one expert a token", "all to one expert")[number % 2])
]


@pytest.mark.sample(
    "('replicated', (4, 1, 4))-one token",
    "('allgather', (2, 1, 4))-one expert a token",
    "('alltoall', (1, 2, 2))-one token",
    "('alltoall', (2, 2, 2))-all to one expert",
    "('alltoall_etp_first', (2, 4, 1))-one expert a token",
    "('alltoall_etp_first', (4, 2, 2))-one token",
)
@pytest.mark.parametrize(("place", "case"), CASES, ids=str)
def test_every_plan(launcher: Launcher, place: tuple[str, tuple[int, int, int]], case: str) -> None:
    """ZeRO stages take turns over the cases: dispatchers know nothing of them."""
    dispatcher, (tp, etp, ep) = place
    stage = (PLACES.index(place) + list(RECIPES).index(case)) % 4
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage, dispatcher=dispatcher)
    # Rows that come expert by expert have a forward of their own under grouped_mm: with no rows too.
    grouped = case == "one token" or (case == "uneven" and PLACES.index(place) % 2)
    implementation = "grouped_mm" if grouped else "eager"
    recipe = replace(RECIPES[case], dp=layout.dp, implementation=implementation)
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


@pytest.mark.sample("alltoall-qwen3_moe")
@pytest.mark.compat  # transformers' grouped forward, and the parts of it that sorted rows run, change between releases
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "alltoall_etp_first"])
def test_grouped_mm(launcher: Launcher, dispatcher: str, family: str) -> None:
    """Rows in any order, and strided ones, are rows to every experts implementation."""
    layout = Layout(world=4, etp=2, ep=2, stage=1, dispatcher=dispatcher)
    recipe = Recipe(family=family, dp=4, steps=2, implementation="grouped_mm")
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


@pytest.mark.sample("replicated-gpt_oss", "allgather-qwen3_moe")
@pytest.mark.parametrize(("dispatcher", "family"), [("replicated", "gpt_oss"), ("allgather", "qwen3_moe")])
def test_few_rows(launcher: Launcher, dispatcher: str, family: str) -> None:
    """Nobody counts them: what no expert has computed holds anything until it is masked, in every gradient."""
    layout = Layout(world=4, tp=4, etp=2 if dispatcher == "allgather" else 1, ep=2, stage=1, dispatcher=dispatcher)
    recipe = Recipe(family=family, dp=layout.dp, steps=2, implementation="grouped_mm", lengths=(12, 5))
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))
