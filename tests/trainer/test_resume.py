"""Trainer's checkpoints: their number, the best one, and a run that goes on as if it had never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.slow_disk import slow_disk
from tests.export.test_live import LIMIT, assert_same_bits, load
from tests.launcher import Launcher
from tests.sharded import Layout, with_options
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


def complete(folder: Path) -> set[str]:
    """Names of the checkpoints that can be loaded."""
    return {path.parents[1].name for path in folder.glob("checkpoint-*/global_step*/index.json")}


def train_on_a_slow_disk(job: Job, layout: Layout, folder: str) -> list[tuple[str, set[str]]]:
    """A run with asynchronous saves; what rank 0 deleted, and what was complete at that moment."""
    deleted: list[tuple[str, set[str]]] = []
    original = shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        deleted.append((Path(path).name, complete(Path(folder))))
        original(path, *args, **kwargs)

    shutil.rmtree = rmtree  # type: ignore[assignment]
    try:
        # The save of a step outlasts the next step: 0.2 MB a rank.
        with slow_disk(2.0):
            run_sharded(job, layout, folder)
    finally:
        shutil.rmtree = original
    return [entry for entry in deleted if entry[0].startswith("checkpoint-")]


def test_asynchronous_saves_rotate_once_they_are_complete(launcher: Launcher, tmp_path: Path) -> None:
    layout = with_options(Layout(world=2, etp=2, stage=1), async_save=True)
    options: tuple[tuple[str, Any], ...] = (
        *(("save_strategy", "steps"), ("save_steps", 1), ("eval_strategy", "steps"), ("eval_steps", 1)),
        ("save_total_limit", 1),
    )
    # The largest loss is the first step's: with it as the best, the end of training deletes the last checkpoint.
    best = (*options, ("metric_for_best_model", "loss"), ("greater_is_better", True))
    for name, chosen, left in (("last", options, "checkpoint-3"), ("best", best, "checkpoint-1")):
        folder = tmp_path / name
        deleted = launcher.run(
            2, train_on_a_slow_disk, timeout=LIMIT, job=Job(options=chosen), layout=layout, folder=str(folder)
        )[0]
        assert deleted, "the test's own premise"
        for path, whole in deleted:
            # What is deleted was complete, and so is another one, at that moment.
            assert path in whole and len(whole) > 1, (path, whole)
        assert checkpoints(folder) == [left] and complete(folder) == {left}
