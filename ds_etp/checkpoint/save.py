"""Saving a checkpoint: each chunk of each tensor is written once, in parallel, by a rank that holds it.

The ranks of a pipeline stage read its tensors in the order of the save plan, while a thread of each writes what it has
read. Nothing of a save can be mistaken for a checkpoint before index.json is in place, which is the last thing written
but `latest`, and an earlier save of the same tag stays whole until then.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.checkpoint.async_save import PendingSave
from ds_etp.checkpoint.chunks import LogicalTensor, logical_tensors
from ds_etp.checkpoint.commit import Commit
from ds_etp.checkpoint.folder import FileNames, next_generation, remove
from ds_etp.checkpoint.metadata import StageMetadata, gather_metadata, make_index, stage_metadata
from ds_etp.checkpoint.save_plan import WriteItem, global_save_plan, local_save_plan, written_chunks
from ds_etp.checkpoint.states import EngineStates
from ds_etp.checkpoint.write_queue import WriteQueue
from ds_etp.checkpoint.writer import FileMetadata, TensorFile
from ds_etp.errors import CheckpointError
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
        asynchronous: returns once host copies are made.
    """

    directory: Path
    tag: str
    engine: dict[str, Any]
    state: dict[str, Any]
    layout: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    save_latest: bool = True
    exclude_frozen: bool = False
    asynchronous: bool = False

    @property
    def folder(self) -> Path:
        """The tag's folder."""
        return self.directory / self.tag


def save(model: nn.Module, states: EngineStates, topology: Topology, request: SaveRequest) -> PendingSave | None:
    """Writes a checkpoint. Collective over the world.

    Returns:
        Of an asynchronous save, what is still to be waited for: all tensors are read.

    Raises:
        CheckpointError: on every rank alike, with the reason. The last complete checkpoint is untouched, and so
            is the engine.
    """
    what, rank = f"saving checkpoint {request.folder}", dist.get_rank()
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
        state = serialized_state(request.state)
        request.folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            generation = next_generation(request.folder)
    items, saved = global_save_plan(what, items, topology)
    names = FileNames(request.folder, broadcast_object(generation))
    by_rank, parameters = gather_metadata(written_chunks(items, rank), own_metadata, first_ranks)
    file: TensorFile | None = None
    commit: Commit | None = None
    try:
        with raise_on_all_ranks(what):
            if rank == 0:
                index = make_index(saved, by_rank, parameters, states.optimizer_class, names)
                index.engine, index.layout = request.engine, request.layout
                index.extra = {"tag": request.tag, **request.extra, **index.extra}
                commit = Commit(names, request.tag if request.save_latest else None, index, state)
            entries = [entry for item in items if item.writer == rank for _, entry in item.entries()]
            file = TensorFile(names.data(rank), entries) if entries else None
    except CheckpointError:
        _drop(file, names.data(rank))
        raise
    if request.asynchronous:
        return _write_later(items, PendingSave(what, names, file, commit), file)
    _write_now(what, items, names, file, commit)
    return None


def _write_now(
    what: str, items: list[WriteItem], names: FileNames, file: TensorFile | None, commit: Commit | None
) -> None:
    try:
        with WriteQueue() as queue:
            failure = _read(items, file, queue)
            if file is not None and failure is None:
                queue.put(0, file.finish)
        raise_if_any_failed(what, failure or queue.failure)
        files = _gather_files(file)
        with raise_on_all_ranks(what):
            if commit is not None:
                commit.stage(files)
    except BaseException:
        _drop(file, names.data(dist.get_rank()))
        if commit is not None:
            commit.discard()
        raise
    with raise_on_all_ranks(what):
        if commit is not None:
            commit.place()


def _write_later(items: list[WriteItem], pending: PendingSave, file: TensorFile | None) -> PendingSave:
    pending.start()
    try:
        failure = _read(items, file, pending, copy=True)
        raise_if_any_failed(pending.what, failure or pending.failure)
    except BaseException:
        pending.cancel()
        raise
    pending.hand_over()
    return pending


def _read(
    items: list[WriteItem], file: TensorFile | None, queue: WriteQueue, *, copy: bool = False
) -> Exception | None:
    """Reads in the order of the save plan, and hands this rank's chunks to the writer thread.

    Args:
        items: the save plan.
        file: where this rank's chunks go.
        queue: the writer thread.
        copy: whether the chunks are to be in memory of their own, since the engine goes on before they are written.

    Returns:
        What went wrong on the host. Reading goes on after it: peers are waiting.
    """
    failure: Exception | None = None
    for item in items:
        shard = item.read()
        if shard is None or file is None or failure is not None or queue.failure is not None:
            continue
        try:
            for chunk, entry in item.entries():
                queue.put(entry.nbytes, partial(file.add, entry.key, _on_host(chunk.of(shard), copy)))
        except Exception as error:  # out of memory, say
            failure = error
    return failure


def _on_host(values: Tensor, copy: bool) -> Tensor:
    values = values.detach()
    if copy and values.device.type == "cpu":
        # Of the values alone: a view would keep all that was gathered, or be the weights that training changes.
        return values.clone(memory_format=torch.contiguous_format)
    # Here, not on the writer thread: there the copy would not wait for what this thread has launched.
    return values.to("cpu")


def _gather_files(file: TensorFile | None) -> dict[int, FileMetadata | None]:
    """Every rank's file, on rank 0. Collective over the world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    answers: list[FileMetadata | None] | None = [None] * world if rank == 0 else None
    dist.gather_object(None if file is None else file.metadata, answers, dst=0)
    return dict(enumerate(answers or []))


def _drop(file: TensorFile | None, path: Path) -> None:
    if file is not None:
        file.close()
        remove(path)


def serialized_state(state: dict[str, Any]) -> bytes:
    """The content of the state file.

    Raises:
        CheckpointError: something in it is neither a plain value nor a tensor.
    """
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
