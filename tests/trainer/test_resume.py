"""Trainer's checkpoints: their number, the best one, and a run that goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.test_live import LIMIT, assert_same_bits, load
from tests.launcher import Launcher
from tests.sharded import Layout
from tests.trainer.runs import Job, Outcome, run_sharded
from tests.trainer.test_trainer import assert_equal, plain

SAVE: tuple[tuple[str, Any], ...] = (
    ("num_train_epochs", 2),
    ("eval_strategy", "steps"),
    ("eval_steps", 1),
    ("save_strategy", "steps"),
    ("save_steps", 1),
    ("save_total_limit", 2),
)


def train(launcher: Launcher, layout: Layout, job: Job, folder: Path) -> Outcome:
    """One run on all ranks."""
    result: Outcome = launcher.run(
        layout.world, run_sharded, timeout=LIMIT, job=job, layout=layout, folder=str(folder)
    )[0]
    return result


def checkpoints(folder: Path) -> list[str]:
    """Names of a Trainer's checkpoints, oldest first."""
    return sorted((path.name for path in folder.glob("checkpoint-*")), key=lambda name: int(name.rpartition("-")[2]))


@pytest.mark.sample("zero3")
@pytest.mark.parametrize(
    "layout",
    [Layout(world=2, etp=2, stage=1), Layout(world=2, etp=2, stage=3), Layout(world=4, tp=2, etp=2, ep=2, stage=2)],
    ids=["zero1", "zero3", "tp2-ep2-zero2"],
)
def test_a_resumed_run_is_the_same_run(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    whole = train(launcher, layout, Job(options=SAVE), tmp_path / "whole")
    assert whole.facts["steps"] == 6
    assert checkpoints(tmp_path / "whole") == ["checkpoint-5", "checkpoint-6"]

    stopped = train(launcher, layout, Job(options=SAVE, stop_after=3), tmp_path / "parts")
    assert stopped.facts["steps"] == 3
    resumed = train(launcher, layout, Job(options=SAVE, resume=True), tmp_path / "parts")
    # To the bit: the same sums in the same order. The log goes on from the checkpoint's.
    assert resumed.losses == whole.losses
    assert resumed.norms == whole.norms
    assert resumed.rates == whole.rates
    assert resumed.evaluations == whole.evaluations
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
    assert_equal(resumed, plain(Job(options=(*SAVE[:3], ("save_strategy", "no")))), evaluations=False)
    # Each checkpoint holds the model too, as Trainer's do.
    assert_same_bits(load(tmp_path / "parts" / "checkpoint-6"), whole.weights)


def test_the_best_model_is_loaded_at_the_end(launcher: Launcher, tmp_path: Path) -> None:
    layout = Layout(world=2, etp=2, stage=1)
    # The first step lowers the loss most: with the largest one as the best it is not the last checkpoint.
    largest = (("load_best_model_at_end", True), ("metric_for_best_model", "loss"), ("greater_is_better", True))
    result = train(launcher, layout, Job(options=(*SAVE, *largest)), tmp_path)
    best = result.facts["best"]
    assert best is not None and best.endswith(f"checkpoint-{1 + result.evaluations.index(max(result.evaluations))}")
    assert not best.endswith("checkpoint-6")
    assert_same_bits(load(tmp_path / "model"), load(Path(best)).state_dict())
