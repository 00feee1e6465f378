"""Saving a checkpoint: each chunk of each tensor is written once, in parallel, by a rank that holds it.

The ranks of a pipeline stage read its tensors in the order of the save plan. Nothing of a save can be mistaken for a
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
from ds_etp.checkpoint.folder import clean, next_generation, remove
from ds_etp.checkpoint.format import INDEX, LATEST, Index, StoredChunk, StoredTensor
from ds_etp.checkpoint.metadata import StageMetadata, WriteResult, gather_metadata, make_index, stage_metadata
from ds_etp.checkpoint.save_plan import WriteItem, global_save_plan, local_save_plan
from ds_etp.checkpoint.states import EngineStates
from ds_etp.checkpoint.writer import FileMetadata, TensorFile, sync_folder, write_durably, write_temporary
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
        extra: further entries of the index.
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
    own_metadata: StageMetadata | None = None
    first_ranks = topology.group_of("pp", 0)
    state = b""
    generation = ""
    assert_same_on_all_ranks("saving a checkpoint", (str(request.folder), request.exclude_frozen))
    with raise_on_all_ranks(what):
        tensors = logical_tensors(model, topology, rank)
        items = local_save_plan(model, tensors, states, request.exclude_frozen, topology)
        own_metadata = stage_metadata(tensors, states) if rank in first_ranks else None
        state = _serialized(request.state)
        request.folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            generation = next_generation(request.folder)
    items, saved = global_save_plan(what, items, topology)
    generation = broadcast_object(generation)
    path = request.folder / f"rank{rank:05d}{generation}.safetensors"
    written = _write(what, path, items)
    by_rank, parameters = gather_metadata(written, own_metadata, first_ranks)
    failure: Exception | None = None
    index, temporary = Index({}, {}, {}, None, {}, {}), None
    if rank == 0:
        try:
            index = make_index(saved, by_rank, parameters, states.optimizer_class)
            index.engine, index.layout = request.engine, request.layout
            index.extra = {"tag": request.tag, **request.extra, **index.extra}
            temporary = _write_temporary_index(index, request.folder, f"state{generation}.pt", state)
        except Exception as error:
            failure = error
    try:
        raise_if_any_failed(what, failure)
    except CheckpointError:
        remove(path, request.folder / f"state{generation}.pt")
        raise
    with raise_on_all_ranks(what):
        if temporary is not None:
            os.replace(temporary, request.folder / INDEX)
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


def _write(what: str, path: Path, items: list[WriteItem]) -> WriteResult:
    """Writes this rank's chunks in the order of the save plan. Goes on reading after a failure: peers are waiting."""
    rank = dist.get_rank()
    failure: Exception | None = None
    file: TensorFile | None = None
    metadata: FileMetadata | None = None
    chunks: list[tuple[str, int, Chunk]] = []
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
            for chunk, entry in item.entries():
                file.add(entry.key, chunk.of(shard))
                chunks.append((item.metadata.key, chunk.number, chunk.logical))
        except Exception as error:
            failure = error
    try:
        if file is not None and failure is None:
            metadata = file.finish()
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
    return WriteResult(metadata, chunks)


def _write_temporary_index(index: Index, folder: Path, state_file: str, state: bytes) -> Path:
    """Gives files their names of this generation, checks that they are there, and writes all but the index."""
    suffix = state_file.removeprefix("state").removesuffix(".pt") + ".safetensors"
    index.files = {name + suffix: metadata for name, metadata in index.files.items()}
    index.tensors = {
        key: StoredTensor(t.dtype, t.shape, tuple(StoredChunk(s.chunk, s.file + suffix, s.key) for s in t.chunks))
        for key, t in index.tensors.items()
    }
    for name, metadata in index.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != metadata.bytes:
            raise CheckpointError(f"{folder / name} is not there as rank 0 sees it: all ranks need one shared folder")
    index.files[state_file] = write_durably(folder / state_file, state)
    index.extra["state_file"] = state_file
    return write_temporary(folder / INDEX, index.dump())
