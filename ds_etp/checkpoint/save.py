"""Saving: every box of every logical tensor once, in parallel, by a rank that holds it.

The ranks of a pipeline stage walk its tensors in one order (see `walk`). Nothing of a save can be mistaken for a
checkpoint before index.json is in place, which is the last thing written but `latest`, and an earlier save of the same
tag stays whole until then.
"""

from __future__ import annotations

import io
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_etp.checkpoint.chunks import Chunk, LogicalTensor, logical_tensors
from ds_etp.checkpoint.collect import StageMetadata, Written, gathered, index_of
from ds_etp.checkpoint.folder import clean, next_generation, remove
from ds_etp.checkpoint.format import INDEX, LATEST, Index, StoredBox, StoredTensor
from ds_etp.checkpoint.states import EngineStates
from ds_etp.checkpoint.walk import WriteItem, agreed_walk, own_items
from ds_etp.checkpoint.writer import FileFacts, TensorFile, stage, sync_folder, write_durably
from ds_etp.errors import CheckpointError
from ds_etp.log import logger
from ds_etp.parallel.consensus import (
    assert_same_on_all_ranks,
    broadcast_object,
    raise_if_any_failed,
    raise_on_all_ranks,
)
from ds_etp.parallel.topology import Topology


@dataclass(frozen=True)
class SaveRequest:
    """What to save, apart from the tensors.

    Attributes:
        directory, tag: where; the tag is a folder in the directory.
        engine: counters and the like, as JSON has them.
        state: lr scheduler, client state: plain values and tensors, no objects.
        layout: sizes and ZeRO stage, for the log.
        extra: further facts for the index.
        save_latest: whether `latest` is to name the tag.
        exclude_frozen: leaves out parameters that aren't trained.
    """

    directory: Path
    tag: str
    engine: dict[str, Any]
    state: dict[str, Any]
    layout: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    save_latest: bool = True
    exclude_frozen: bool = False

    @property
    def folder(self) -> Path:
        """The tag's folder."""
        return self.directory / self.tag


def save(model: nn.Module, states: EngineStates, topology: Topology, request: SaveRequest) -> None:
    """Writes a checkpoint. Collective over the world.

    Raises:
        CheckpointError: on every rank alike, with the reason. The last complete checkpoint is untouched, and so
            is the engine.
    """
    what, rank, start = f"saving checkpoint {request.folder}", dist.get_rank(), time.monotonic()
    tensors: list[LogicalTensor] = []
    items: list[WriteItem] = []
    facts: StageMetadata | None = None
    firsts = topology.group_of("pp", 0)
    state = b""
    generation = ""
    assert_same_on_all_ranks("saving a checkpoint", (str(request.folder), request.exclude_frozen))
    with raise_on_all_ranks(what):
        tensors = logical_tensors(model, topology, rank)
        items = own_items(model, tensors, states, request.exclude_frozen, topology)
        facts = StageMetadata.of(tensors, states) if rank in firsts else None
        state = _serialized(request.state)
        request.folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            generation = next_generation(request.folder)
    items, walk = agreed_walk(what, items, topology)
    generation = broadcast_object(generation)
    path = request.folder / f"rank{rank:05d}{generation}.safetensors"
    by_rank, everything = gathered(_write(what, path, items), facts, firsts)
    failure: Exception | None = None
    index, staged = Index({}, {}, {}, None, {}, {}), None
    if rank == 0:
        try:
            index = index_of(walk, by_rank, everything, states.optimizer_class)
            index.engine, index.layout = request.engine, request.layout
            index.extra = {"tag": request.tag, **request.extra, **index.extra}
            staged = _stage_index(index, request.folder, f"state{generation}.pt", state)
        except Exception as error:
            failure = error
    try:
        raise_if_any_failed(what, failure)
    except CheckpointError:
        remove(path, request.folder / f"state{generation}.pt")
        raise
    with raise_on_all_ranks(what):
        if staged is not None:
            os.replace(staged, request.folder / INDEX)
            sync_folder(request.folder)
            sync_folder(request.directory)
            if request.save_latest:
                write_durably(request.directory / LATEST, request.tag.encode())
            clean(request.folder, keep={*index.files, INDEX})
    if rank == 0:
        total = sum(entry.bytes for entry in index.files.values())
        seconds = time.monotonic() - start
        logger().info("saved %s: %.1f MB in %d files, %.1f s", request.folder, total / 1e6, len(index.files), seconds)


def _serialized(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "client_state or the lr scheduler's state holds an object that only running code from the file could "
            f"restore. Give plain values and tensors. ({str(error).splitlines()[0]})"
        ) from error
    return buffer.getvalue()


def _write(what: str, path: Path, items: list[WriteItem]) -> Written:
    """Walks the tensors and writes this rank's boxes. Goes on walking after a failure: peers are waiting."""
    rank = dist.get_rank()
    failure: Exception | None = None
    file: TensorFile | None = None
    facts: FileFacts | None = None
    boxes: list[tuple[str, int, Chunk]] = []
    entries = [entry for item in items if item.writer == rank for _, entry in item.entries()]
    try:
        file = TensorFile(path, entries) if entries else None
    except Exception as error:
        failure = error
    for item in items:
        shard = item.read()
        if shard is None or failure is not None or file is None:
            continue
        try:
            for piece, entry in item.entries():
                file.add(entry.key, piece.of(shard))
                boxes.append((item.key, piece.number, piece.box))
        except Exception as error:
            failure = error
    try:
        if file is not None and failure is None:
            facts = file.finish()
            sync_folder(path.parent)
    except Exception as error:
        failure = error
    try:
        raise_if_any_failed(what, failure)
    except CheckpointError:
        if file is not None:
            file.close()
        remove(path)
        raise
    return Written(facts, boxes)


def _stage_index(index: Index, folder: Path, state_file: str, state: bytes) -> Path:
    """Gives files their names of this generation, checks that they are there, and writes all but the index."""
    suffix = state_file.removeprefix("state").removesuffix(".pt") + ".safetensors"
    index.files = {name + suffix: facts for name, facts in index.files.items()}
    index.tensors = {
        key: StoredTensor(t.dtype, t.shape, tuple(StoredBox(s.box, s.file + suffix, s.key) for s in t.boxes))
        for key, t in index.tensors.items()
    }
    for name, facts in index.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != facts.bytes:
            raise CheckpointError(f"{folder / name} is not there as rank 0 sees it: all ranks need one shared folder")
    index.files[state_file] = write_durably(folder / state_file, state)
    index.extra["state_file"] = state_file
    return stage(folder / INDEX, index.dump())
