"""Damaged, foreign and unwritable checkpoints: the same clear error on every rank, and an engine unharmed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_etp.checkpoint.format import StoredCheckpoint
from ds_etp.errors import CheckpointError
from ds_etp.parallel.consensus import all_gather_object
from tests.checkpoint.runs import RECIPE, engine_for, go
from tests.launcher import Launcher
from tests.sharded import Layout

LAYOUT = Layout(2, 2, 2, 1, 2)


def digest(engine: Any) -> str:
    """Weights, masters and optimizer states of this rank, to the bit."""
    total = hashlib.sha256()
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    tensors = [parameter.data for parameter in engine.module.parameters()]
    for group in base.param_groups:
        total.update(repr({key: value for key, value in group.items() if key != "params"}).encode())
        for owner in group["params"]:
            tensors += [owner.data, *(value for value in base.state[owner].values() if torch.is_tensor(value))]
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A damage: a change to index.json."""

    def damage(folder: Path) -> None:
        path = folder / "index.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def truncate(folder: Path) -> None:
    path = folder / "rank00001.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def flip(folder: Path) -> None:
    path = folder / "rank00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def not_a_file(folder: Path) -> None:
    (folder / "index.json").unlink()
    (folder / "index.json").mkdir()


def stock(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"")


def drop_chunks(content: dict[str, Any]) -> None:
    next(iter(content["tensors"].values()))["boxes"].pop()


def file_instead_of_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


# What is done to a good checkpoint, and what the error has to say. The file's name is among it.
DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated": (truncate, ["rank00001.safetensors is damaged", "bytes"]),
    "one-bit": (flip, ["rank00001.safetensors is damaged", "sha256"]),
    "deleted": (lambda folder: (folder / "rank00001.safetensors").unlink(), ["rank00001.safetensors is missing"]),
    "no-state": (lambda folder: (folder / "state.pt").unlink(), ["state.pt is missing"]),
    "no-index": (lambda folder: (folder / "index.json").unlink(), ["is incomplete", "no-index", "index.json"]),
    "half-index": (lambda folder: os.truncate(folder / "index.json", 900), ["index.json is damaged"]),
    "unreadable": (not_a_file, ["index.json cannot be read"]),
    "lacks-a-chunk": (edited(drop_chunks), ["index.json is damaged", "entries"]),
    "newer": (edited(lambda content: content.update(format=7, ds_etp="9.9")), ["index.json has format 7", "9.9"]),
    "stock": (stock, ["was written by DeepSpeed without ds_etp", "ds_etp.save_checkpoint"]),
    "not-a-folder": (file_instead_of_folder, ["is not a folder"]),
}


def error_of(action: Callable[[], Any]) -> str:
    """The message of the CheckpointError that an action has to raise, the same on every rank."""
    try:
        action()
        message = "nothing was raised"
    except CheckpointError as error:
        message = str(error)
    messages = all_gather_object(message)
    assert len(set(messages)) == 1, messages
    return message


def load_damaged(folder: str) -> dict[str, str]:
    """One engine meets every damaged checkpoint, and goes on as if it had met none."""
    root, rank = Path(folder), dist.get_rank()
    engine = engine_for(RECIPE, LAYOUT)
    go(engine, RECIPE, LAYOUT, 0, 1)
    engine.save_checkpoint(folder, tag="good")
    go(engine, RECIPE, LAYOUT, 1, 1)
    other = engine_for(replace(RECIPE, changes=(("num_hidden_layers", 1),)), LAYOUT)
    other.save_checkpoint(folder, tag="other-model", save_latest=False)
    other.destroy()
    before, messages = digest(engine), {}
    for name, (damage, _) in DAMAGES.items():
        if rank == 0:
            shutil.copytree(root / "good", root / name)
            damage(root / name)
        dist.barrier()
        messages[name] = error_of(lambda name=name: engine.load_checkpoint(folder, tag=name))
        assert digest(engine) == before, name
    messages["other-model"] = error_of(lambda: engine.load_checkpoint(folder, tag="other-model"))
    messages["object"] = error_of(lambda: engine.save_checkpoint(folder, client_state={"x": Launcher}))
    messages["tags"] = error_of(lambda: engine.save_checkpoint(folder, tag=f"tag{rank}"))
    assert not list(root.glob("tag*")), "a folder for a save that was refused"
    messages["load-tags"] = error_of(lambda: engine.load_checkpoint(folder, tag=["good", "newer"][rank]))
    messages["no-folder"] = error_of(lambda: engine.save_checkpoint(f"{folder}/not-a-folder"))
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, None)
    assert digest(engine) == before
    assert (root / "latest").read_text() == "good"
    go(engine, RECIPE, LAYOUT, 2, 1)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    engine.destroy()
    return messages


def test_damaged_and_foreign(launcher: Launcher, tmp_path: Path) -> None:
    messages = launcher.run(2, load_damaged, folder=str(tmp_path), timeout=240)[0]
    for name, (_, phrases) in DAMAGES.items():
        for phrase in [str(tmp_path / name), *phrases]:
            assert phrase in messages[name], messages[name]
    assert "was written by another model" in messages["other-model"]
    assert "client_state" in messages["object"]
    assert "ranks disagree" in messages["tags"] and "ranks disagree" in messages["load-tags"]
    assert "not-a-folder" in messages["no-folder"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the tiny model, and not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_disk(folder: str) -> tuple[str, list[str]]:
    """Saves where there is room for one checkpoint: the second fails, and leaves the first and no rest."""
    engine = engine_for(RECIPE, LAYOUT)
    go(engine, RECIPE, LAYOUT, 0, 1)
    engine.save_checkpoint(folder)
    go(engine, RECIPE, LAYOUT, 1, 1)
    before = digest(engine)
    message = error_of(lambda: engine.save_checkpoint(folder))
    # The same tag once more: the one that is there must outlive the attempt to replace it.
    again = error_of(lambda: engine.save_checkpoint(folder, tag="global_step1"))
    assert digest(engine) == before
    go(engine, RECIPE, LAYOUT, 2, 1)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    engine.destroy()
    return message, [again, *sorted(str(path.name) for path in Path(folder).rglob("*.safetensors"))]


def test_full_disk(launcher: Launcher, small_disk: Path) -> None:
    message, (again, *files) = launcher.run(2, fill_disk, folder=str(small_disk), timeout=240)[0]
    assert "No space left on device" in message and "global_step2" in message
    assert "No space left on device" in again and "global_step1" in again
    assert files == ["rank00000.safetensors", "rank00001.safetensors"]
    assert (small_disk / "latest").read_text() == "global_step1"
    with StoredCheckpoint.open(small_disk / "global_step1") as stored:
        for name in stored.index.files:
            stored.check_file(name)
