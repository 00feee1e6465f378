"""Saves that overlap reading with writing, and asynchronous ones: what they hold, when they are there, and what is left
when a rank's disk is full or a rank is killed."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_etp
from ds_etp.checkpoint import save as save_module
from ds_etp.checkpoint.format import INDEX, StoredCheckpoint
from ds_etp.errors import CheckpointError
from tests.checkpoint.runs import OTHER_SEED, RECIPE, engine_for, go, tensors_of
from tests.checkpoint.slow_disk import die, full, held_disk, slow_disk, slow_reads, total
from tests.checkpoint.test_faults import error_of
from tests.launcher import CaseFailed, Launcher
from tests.sharded import Layout, with_options

# Seconds a megabyte. Of the tiny model's checkpoint each of two ranks writes 0.2 MB.
SLOW = 4.0
ASYNC = with_options(Layout(2, 1, 2, 1, 3), async_save=True)


def measured_save(folder: str) -> tuple[float, float, float, int]:
    """A save at ZeRO-3 on a disk as slow as the network; of this rank: how long it took from the first read on, how
    long reads and writes took, and how many reads began during a write."""
    engine = engine_for(RECIPE, replace(ASYNC, extra=()))
    go(engine, RECIPE, ASYNC, 0, 1)
    original = save_module._read
    with slow_disk(SLOW) as times:

        def read(items: Any, *rest: Any, **kwargs: Any) -> Any:
            return original(slow_reads(items, times, SLOW / 2), *rest, **kwargs)

        save_module._read = read
        try:
            engine.save_checkpoint(folder)
        finally:
            save_module._read = original
    engine.destroy()
    during = sum(any(start < begin < stop for start, stop in times.writes) for begin, _ in times.reads)
    took = times.writes[-1][1] - times.reads[0][0]
    return took, total(times.reads), total(times.writes), during


def test_reads_go_on_while_writers_write(launcher: Launcher, tmp_path: Path) -> None:
    """From the first read to the last write: the slower of both, plus 15%.

    Each takes about 0.8 s, mostly asleep, so that one after the other would take twice as long. 0.3 s more for the
    first read and the last write, which nothing can overlap with, and for a machine that does other things.
    """
    for took, reading, writing, during in launcher.run(2, measured_save, folder=str(tmp_path)):
        assert min(reading, writing) > 0.5, "the test's own premise: each alone would be long"
        assert took <= 1.15 * max(reading, writing) + 0.3, (took, reading, writing)
        assert during >= 10


def gathers(folder: str) -> list[str]:
    """The collectives of a save and of an export at ZeRO-3 that move parameters."""
    engine = engine_for(RECIPE, replace(ASYNC, extra=()))
    go(engine, RECIPE, ASYNC, 0, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.save_checkpoint(folder)
        ds_etp.save_pretrained(engine, f"{folder}/model")
        ds_etp.save_pretrained(engine, f"{folder}/masters", dtype="fp32")
    # Objects go by all-gathers of bytes. `all_gather_into_tensor` is how ZeRO-3 makes parameters whole on all ranks.
    names = [event.name for event in profile.events() if event.name.startswith(("gloo:", "c10d::"))]
    engine.destroy()
    return names


def test_zero3_gathers_to_the_writer_alone(launcher: Launcher, tmp_path: Path) -> None:
    for names in launcher.run(2, gathers, folder=str(tmp_path)):
        assert any("gather" in name for name in names)
        assert not [name for name in names if "allgather_base" in name or "all_gather_into" in name], set(names)


def save_and_train_on(folder: str, layout: Layout) -> None:
    """Saves, once at once and once asynchronously, and trains on before the disk has the second."""
    engine = engine_for(RECIPE, layout)
    go(engine, RECIPE, layout, 0, 2)
    engine.ds_etp.block = engine.ds_etp.block.model_copy(update={"async_save": False})
    engine.save_checkpoint(folder, tag="now", client_state={"seen": 3})
    engine.ds_etp.block = engine.ds_etp.block.model_copy(update={"async_save": True})
    state, root = {"seen": 3}, Path(folder)
    with held_disk() as released:
        assert engine.save_checkpoint(folder, tag="later", client_state=state) is True
        state["seen"] = 4
        go(engine, RECIPE, layout, 2, 2)
        dist.barrier()
        assert not (root / "later" / INDEX).exists() and (root / "latest").read_text() == "now"
        released.set()
        ds_etp.wait_for_save(engine)
    assert (root / "later" / INDEX).exists() and (root / "latest").read_text() == "later"
    if dist.get_rank() == 0:
        shutil.copytree(root / "later", root / "copy")
    ds_etp.wait_for_save(engine)  # nothing to wait for
    # The next save waits, a load waits, of another engine too, and so does the end.
    other = engine_for(replace(RECIPE, seed=OTHER_SEED), layout)
    nexts = {
        "third": lambda: engine.save_checkpoint(folder, tag="fourth"),
        "fifth": lambda: engine.load_checkpoint(folder),
        "sixth": lambda: other.load_checkpoint(folder, tag="sixth"),
        "later": engine.destroy,
    }
    for tag, next_call in nexts.items():
        with held_disk() as released:
            engine.save_checkpoint(folder, tag=tag)
            # "later" is there: it is replaced, and whole until then.
            assert (root / tag / INDEX).exists() == (tag == "later")
            threading.Timer(0.1, released.set).start()
            next_call()
        assert (root / tag / INDEX).exists() and (root / "latest").read_text() in (tag, "fourth")
    assert other.global_steps == 4
    other.destroy()


@pytest.mark.sample("zero1-bf16", "zero3")
@pytest.mark.parametrize(
    "layout",
    [
        # Where the weights and moments that are saved are those that training changes, and where they are gathered.
        Layout(2, 2, 2, 1, 0),
        Layout(2, 1, 2, 1, 1, dtype="bf16"),
        ASYNC,
    ],
    ids=["zero0", "zero1-bf16", "zero3"],
)
def test_an_asynchronous_save_holds_what_a_save_holds(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    launcher.run(2, save_and_train_on, folder=str(tmp_path), layout=with_options(layout, async_save=True))
    now, later = tensors_of(tmp_path / "now"), tensors_of(tmp_path / "fourth")
    assert now.keys() == later.keys() and any(not torch.equal(now[key], later[key]) for key in now)
    for tag, files in (("copy", "state.pt"), ("later", "state.1.pt")):
        with StoredCheckpoint.open(tmp_path / tag) as stored:
            for name in stored.index.files:
                stored.check_file(name)
            assert {path.name for path in stored.folder.iterdir()} == {*stored.index.files, INDEX}
            assert files in stored.index.files
    later = tensors_of(tmp_path / "copy")
    assert all(torch.equal(now[key], later[key]) for key in now)
    state = torch.load(tmp_path / "copy" / "state.pt", weights_only=True)
    assert state["client_state"] == {"seen": 3}


def failing_saves(folder: str) -> dict[str, str]:
    """Rank 1's disk, then rank 0's, is full during asynchronous saves; whoever waits next says so on all ranks."""
    engine, root, messages = engine_for(RECIPE, ASYNC), Path(folder), {}
    go(engine, RECIPE, ASYNC, 0, 1)
    engine.save_checkpoint(folder, tag="good")
    ways = {
        "wait": (1, lambda: ds_etp.wait_for_save(engine)),
        "save": (0, lambda: engine.save_checkpoint(folder, tag="after")),
        "load": (1, lambda: engine.load_checkpoint(folder)),
        "destroy": (1, engine.destroy),
    }
    ds_etp.wait_for_save(engine)
    for name, (victim, next_call) in ways.items():
        with held_disk(full if dist.get_rank() == victim else None) as released:
            engine.save_checkpoint(folder, tag=name)
            released.set()
            messages[name] = error_of(next_call)
        assert (root / "latest").read_text() == "good" and not (root / name / INDEX).exists()
        dist.barrier()
        assert not list((root / name).glob("*.safetensors")), "what nobody can use fills the disk"
    assert not (root / "after").exists(), "a save that raised has not begun"
    return messages


def test_a_full_disk_is_raised_on_all_ranks_by_whoever_waits(launcher: Launcher, tmp_path: Path) -> None:
    messages = launcher.run(2, failing_saves, folder=str(tmp_path))[0]
    for name, victim in (("wait", 1), ("save", 0), ("load", 1), ("destroy", 1)):
        wanted = f"saving checkpoint {tmp_path / name} failed on rank {victim}: OSError: [Errno 28] No space left"
        assert messages[name].startswith(wanted), messages[name]
        assert messages[name].count("failed on rank") == 1
    assert tensors_of(tmp_path / "good")


def die_later(folder: str, victim: int) -> None:
    """A rank is killed while asynchronous writes are under way and training goes on."""
    engine = engine_for(RECIPE, ASYNC)
    go(engine, RECIPE, ASYNC, 0, 1)
    engine.save_checkpoint(folder, tag="first")
    ds_etp.wait_for_save(engine)
    with held_disk(die if dist.get_rank() == victim else None) as released:
        go(engine, RECIPE, ASYNC, 1, 1)
        engine.save_checkpoint(folder, tag="second")
        go(engine, RECIPE, ASYNC, 2, 1)
        dist.barrier()
        released.set()
        go(engine, RECIPE, ASYNC, 3, 100)


def load_after_kill(folder: str) -> None:
    """Goes on from what is left, and saves over it."""
    engine = engine_for(replace(RECIPE, seed=OTHER_SEED), ASYNC)
    path, _ = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "first" / INDEX) and engine.global_steps == 1
    engine.save_checkpoint(folder, tag="second")
    engine.destroy()


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_write_loses_nothing(launcher: Launcher, tmp_path: Path, victim: int) -> None:
    with pytest.raises(CaseFailed, match="died"):
        launcher.run(2, die_later, folder=str(tmp_path), victim=victim)
    assert (tmp_path / "latest").read_text() == "first"
    with pytest.raises(CheckpointError, match="is incomplete"):
        StoredCheckpoint.open(tmp_path / "second")
    launcher.run(2, load_after_kill, folder=str(tmp_path))
    assert (tmp_path / "latest").read_text() == "second"
    with StoredCheckpoint.open(tmp_path / "second") as stored:
        assert {path.name for path in stored.folder.iterdir()} == {*stored.index.files, INDEX}
