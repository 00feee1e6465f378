"""A process that is killed while it saves leaves the last complete checkpoint, and `latest` names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_etp.checkpoint import commit, writer
from ds_etp.checkpoint.format import INDEX, StoredCheckpoint
from ds_etp.errors import CheckpointError
from tests.checkpoint.runs import RECIPE, engine_for, go, tensors_of
from tests.launcher import CaseFailed, Launcher
from tests.sharded import Layout

LAYOUTS = {1: Layout(1, stage=1), 2: Layout(2, 1, 2, 1, 1)}


def kill_at(module: Any, name: str, call: int, *, after: bool = False) -> None:
    """This process is killed at the `call`-th call of a function (of ours: the process is a test's worker)."""
    original, count = getattr(module, name), 0

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count < call:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, replacement)


# Where, in a world of how many, and on which ranks. Every kill costs new processes, so that most are of one.
POINTS: dict[str, tuple[tuple[Any, str, int, bool], int, tuple[int, ...]]] = {
    "one-rank-in-a-file": ((writer.TensorFile, "add", 9, False), 2, (1,)),
    "all-ranks-in-a-file": ((writer.TensorFile, "add", 9, False), 2, (0, 1)),
    "before-the-index": ((commit, "write_temporary", 1, False), 1, (0,)),
    "index-not-in-place": ((commit, "write_temporary", 1, True), 1, (0,)),
    "before-latest": ((commit, "write_durably", 2, False), 1, (0,)),
}
# By then the new checkpoint is complete; `latest` alone still names the one before.
COMPLETE = ("before-latest",)


def save_and_die(folder: str, tag: str, point: str) -> None:
    """Saves one checkpoint, trains a step and is killed in the second save."""
    (module, name, call, after), world, victims = POINTS[point]
    engine = engine_for(RECIPE, LAYOUTS[world])
    go(engine, RECIPE, LAYOUTS[world], 0, 1)
    engine.save_checkpoint(folder, tag="first")
    go(engine, RECIPE, LAYOUTS[world], 1, 1)
    if dist.get_rank() in victims:
        kill_at(module, name, call, after=after)
    engine.save_checkpoint(folder, tag=tag)


def load_all(folders: list[str]) -> list[int]:
    """Loads the latest of each, saves over what the killed save left, and reports where training stood."""
    engine = engine_for(RECIPE, LAYOUTS[1])
    found = []
    for folder in folders:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        found.append(engine.global_steps)
        engine.save_checkpoint(folder, tag="second")
    engine.destroy()
    return found


def test_kills(launcher: Launcher, tmp_path: Path) -> None:
    truth: dict[int, dict[str, torch.Tensor]] = {}
    folders = []
    for point, tag in [*((point, "second") for point in POINTS), ("index-not-in-place", "first")]:
        folder, world = tmp_path / f"{point}-{tag}", POINTS[point][1]
        folders.append(str(folder))
        with pytest.raises(CaseFailed, match="died"):
            launcher.run(world, save_and_die, folder=str(folder), tag=tag, point=point)
        assert (folder / "latest").read_text() == "first"
        tensors = tensors_of(folder / "first")
        wanted = truth.setdefault(world, tensors)
        assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[key], wanted[key]) for key in wanted)
        with StoredCheckpoint.open(folder / "first") as stored:
            for name in stored.index.files:
                stored.check_file(name)
        if tag == "second":
            assert (folder / tag / INDEX).exists() == (point in COMPLETE)
            if point not in COMPLETE:
                with pytest.raises(CheckpointError, match="is incomplete"):
                    StoredCheckpoint.open(folder / tag)
    assert launcher.run(1, load_all, folders=folders) == [[1] * len(folders)]
    for folder_name in folders:
        # The save after the killed one takes its remains away.
        folder = Path(folder_name)
        assert (folder / "latest").read_text() == "second"
        with StoredCheckpoint.open(folder / "second") as stored:
            left = {path.name for path in (folder / "second").iterdir()}
            assert left == {*stored.index.files, INDEX}
