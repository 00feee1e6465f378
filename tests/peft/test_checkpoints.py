"""Checkpoints of models that are trained in part: with adapters, and with experts or the rest frozen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_etp.checkpoint.export_api import export_checkpoint
from ds_etp.errors import CheckpointError
from tests.checkpoint.runs import RECIPE, save_after
from tests.checkpoint.test_reshard import assert_next_steps
from tests.launcher import Launcher
from tests.peft.models import BOTH
from tests.sharded import Layout

ADAPTED = replace(BOTH, optimizer="adamw")
STAGES = [0, 1, 2, 3]
# Each stage saves on one layout and loads on another.
BEFORE = {0: Layout(4, 2, 4, 1, 0), 1: Layout(4, 1, 2, 2, 1), 2: Layout(4, 2, 2, 2, 2), 3: Layout(4, 2, 2, 1, 3)}
AFTER = {0: Layout(2, 1, 1, 2, 3), 1: Layout(4, 2, 1, 2, 0), 2: Layout(2, 1, 2, 1, 1), 3: Layout(4, 1, 4, 1, 2)}


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", STAGES)
def test_adapters(launcher: Launcher, tmp_path: Path, stage: int) -> None:
    """Base, adapters and their moments."""
    assert_next_steps(launcher, tmp_path, BEFORE[stage], AFTER[stage], ADAPTED)


@pytest.mark.sample("0-experts", "3-dense")
@pytest.mark.parametrize("frozen", ["experts", "dense"])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen(launcher: Launcher, tmp_path: Path, stage: int, frozen: str) -> None:
    """Trained routers over frozen experts, and the reverse; each stage goes on at another one."""
    assert_next_steps(launcher, tmp_path, BEFORE[stage], AFTER[stage], replace(RECIPE, frozen=frozen))


def test_offline_export_says_where_to_turn(launcher: Launcher, tmp_path: Path) -> None:
    """A checkpoint doesn't hold the adapters' config."""
    launcher.run(2, save_after, recipe=replace(ADAPTED, dp=2), layout=Layout(2, etp=2), folder=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds a model of PEFT.*ds_etp\.save_pretrained\(engine, folder\)"):
        export_checkpoint(tmp_path, tmp_path / "out")
