"""Saved on one layout, loaded on another: the next steps are the unsharded run's, moments included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.runs import RECIPE, load_and_go, save_after, tensors_of, unsharded
from tests.hosts import skip_if_refused
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.parity.test_kinds import KINDS, TOLERANCES
from tests.sharded import Layout
from tests.tolerances import LOSS, NORM, TENSOR

PLAIN = {"with_block": False}
# world, tp, etp, ep, stage; (ep * etp) is not a multiple of tp in some, and etp and tp ranks differ in most.
PAIRS = {
    "tp2etp2 to ep2": (Layout(4, 2, 2, 1, 1), Layout(2, 1, 1, 2, 3)),
    "etp2ep2 to tp2etp2": (Layout(4, 1, 2, 2, 2), Layout(4, 2, 2, 1, 1)),
    "tp4etp2 on 8 to etp4": (Layout(8, 4, 2, 1, 1), Layout(4, 1, 4, 1, 0)),
    "one rank to tp2": (Layout(1, stage=0), Layout(4, 2, 1, 1, 2)),
    "tp2 to one rank": (Layout(4, 2, 1, 1, 1), Layout(1, stage=0)),
    "tp2etp4ep2 on 8 to tp2etp2": (Layout(8, 2, 4, 2, 2), Layout(2, 2, 2, 1, 0)),
    "ep4 to tp4etp2ep2 on 8": (Layout(4, 1, 1, 4, 3), Layout(8, 4, 2, 2, 1)),
    "etp2 to tp4ep2": (Layout(2, 1, 2, 1, 0), Layout(4, 4, 1, 2, 3)),
    "tp2etp4 to etp2ep2": (Layout(4, 2, 4, 1, 3), Layout(4, 1, 2, 2, 2)),
    "tp2etp2ep2 on 8 to tp2etp2": (Layout(8, 2, 2, 2, 3), Layout(2, 2, 2, 1, 2)),
    "three ranks to tp2ep2": (Layout(3, stage=2), Layout(4, 2, 1, 2, 1)),
    "tp4etp2 to etp4ep2 on 8": (Layout(4, 4, 2, 1, 0), Layout(8, 1, 4, 2, 3)),
    "tp4etp2 to plain": (Layout(4, 4, 2, 1, 3), Layout(2, stage=1, **PLAIN)),
    "plain to tp2etp2": (Layout(2, stage=2, **PLAIN), Layout(4, 2, 2, 1, 1)),
    "plain ZeRO-3 to etp2": (Layout(2, stage=3, **PLAIN), Layout(2, 1, 2, 1, 2)),
    "etp2 to ep2": (Layout(2, 1, 2, 1, 2), Layout(2, 1, 1, 2, 1)),
}
# What `make compat` runs: where DeepSpeed keeps states differs between its releases.
CORNER_CASES = ("tp2etp2 to ep2", "etp2ep2 to tp2etp2", "plain ZeRO-3 to etp2", "etp2 to ep2")


def assert_next_steps(
    launcher: Launcher, folder: Path, before: Layout, after: Layout, recipe: Recipe = RECIPE, tensor: float = TENSOR
) -> None:
    """Saves on one layout, loads on another, and compares what comes next with the unsharded run."""
    saved, again = str(folder / "saved"), str(folder / "resaved")
    launcher.run(before.world, save_after, recipe=recipe, layout=before, folder=saved)
    truth = unsharded(recipe, before.dp, after.dp)
    for steps in launcher.run(after.world, load_and_go, recipe=recipe, layout=after, folder=saved, again=again):
        for got, wanted, limit in ((steps.losses, truth.losses, LOSS), (steps.norms, truth.norms, NORM)):
            assert all(abs(a - b) <= limit * abs(b) for a, b in zip(got, wanted, strict=True)), (got, wanted)
    tensors = tensors_of(folder / "resaved" / "again")
    assert {key for key in tensors if not key.startswith("buffer/")} == set(truth.tensors)
    for key, wanted in truth.tensors.items():
        error = ((tensors[key] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
        assert error <= tensor, f"{key} is off by {error:.1e} of its largest entry"


@pytest.mark.sample(
    "tp2etp4ep2 on 8 to tp2etp2",
    "etp2 to tp4ep2",
    "tp2etp4 to etp2ep2",
    "tp4etp2 to plain",
    "plain ZeRO-3 to etp2",
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.compat] if name in CORNER_CASES else []) for name in PAIRS]
)
def test_next_steps(launcher: Launcher, tmp_path: Path, name: str) -> None:
    before, after = PAIRS[name]
    skip_if_refused(before, after)
    assert_next_steps(launcher, tmp_path, before, after)


@pytest.mark.sample("gpt_oss", "longcat_flash")
@pytest.mark.parametrize("family", KINDS)
def test_every_kind_of_layout(launcher: Launcher, tmp_path: Path, family: str) -> None:
    """Interleaved and transposed weights, biases that one rank adds, rows of experts without weights."""
    before, after = Layout(4, etp=2, ep=2, stage=1), Layout(4, etp=4, stage=3)
    recipe = replace(RECIPE, family=family)
    assert_next_steps(launcher, tmp_path, before, after, recipe, tensor=TOLERANCES.get(family, TENSOR))
