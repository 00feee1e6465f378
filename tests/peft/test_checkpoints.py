"""Checkpoints of models that are trained in part: with adapters, and with experts or the rest frozen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_etp.errors import CheckpointError
from ds_etp.patches.exports import export_checkpoint
from tests.checkpoint.runs import RECIPE, load_and_go, save_after, tensors_of, unsharded
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.peft.models import BOTH
from tests.sharded import Layout
from tests.tolerances import LOSS, NORM, TENSOR

ADAPTED = replace(BOTH, optimizer="adamw")
STAGES = [0, 1, 2, 3]
# Each stage saves on one layout and loads on another.
BEFORE = {0: Layout(4, 2, 4, 1, 0), 1: Layout(4, 1, 2, 2, 1), 2: Layout(4, 2, 2, 2, 2), 3: Layout(4, 2, 2, 1, 3)}
AFTER = {0: Layout(2, 1, 1, 2, 3), 1: Layout(4, 2, 1, 2, 0), 2: Layout(2, 1, 2, 1, 1), 3: Layout(4, 1, 4, 1, 2)}


def check(launcher: Launcher, folder: Path, recipe: Recipe, before: Layout, after: Layout) -> None:
    """Saves on one layout, loads on another, and compares the next steps and what they leave."""
    saved, again = str(folder / "saved"), str(folder / "resaved")
    launcher.run(before.world, save_after, recipe=recipe, layout=before, folder=saved)
    truth = unsharded(recipe, before.dp, after.dp)
    for steps in launcher.run(after.world, load_and_go, recipe=recipe, layout=after, folder=saved, again=again):
        for got, wanted, limit in ((steps.losses, truth.losses, LOSS), (steps.norms, truth.norms, NORM)):
            assert all(abs(a - b) <= limit * abs(b) for a, b in zip(got, wanted, strict=True)), (got, wanted)
    tensors = tensors_of(folder / "resaved" / "again")
    assert {key for key in tensors if not key.startswith("buffer/")} == set(truth.tensors)
    for key, reference in truth.tensors.items():
        error = ((tensors[key] - reference).abs().max() / reference.abs().max().clamp(min=1e-12)).item()
        assert error <= TENSOR, f"{key} is off by {error:.1e} of its largest entry"


@pytest.mark.parametrize("stage", STAGES)
def test_adapters(launcher: Launcher, tmp_path: Path, stage: int) -> None:
    """Base, adapters and their moments."""
    check(launcher, tmp_path, ADAPTED, BEFORE[stage], AFTER[stage])


@pytest.mark.parametrize("frozen", ["experts", "dense"])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen(launcher: Launcher, tmp_path: Path, stage: int, frozen: str) -> None:
    """Trained routers over frozen experts, and the reverse; each stage goes on at another one."""
    check(launcher, tmp_path, replace(RECIPE, frozen=frozen), BEFORE[stage], AFTER[stage])


def test_offline_export_says_where_to_turn(launcher: Launcher, tmp_path: Path) -> None:
    """A checkpoint doesn't hold the adapters' config."""
    launcher.run(2, save_after, recipe=replace(ADAPTED, dp=2), layout=Layout(2, etp=2), folder=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds a model of PEFT.*ds_etp\.save_pretrained\(engine, folder\)"):
        export_checkpoint(tmp_path, tmp_path / "out")
