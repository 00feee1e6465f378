"""Saving: every box of every logical tensor once, in parallel, by a rank that holds it.

Every rank walks the tensors in one order, because reading one is collective over its ZeRO group. Nothing of a
save can be mistaken for a checkpoint before index.json is in place, which is the last thing written but
`latest`, and an earlier save of the same tag stays whole until then.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.checkpoint.agree import agreed, everyone, from_first, raise_together, same_everywhere
from ds_etp.checkpoint.boxes import Box, LogicalTensor, Piece, logical_tensors, persistent_buffers
from ds_etp.checkpoint.folder import clean, next_generation, remove
from ds_etp.checkpoint.format import BUFFER, INDEX, LATEST, WEIGHT, Index, StoredBox, StoredTensor
from ds_etp.checkpoint.states import EngineStates, settings
from ds_etp.checkpoint.writer import Entry, FileFacts, TensorFile, stage, sync_folder, write_durably
from ds_etp.errors import CheckpointError
from ds_etp.log import logger
from ds_etp.topology import Topology


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


@dataclass(frozen=True)
class _Item:
    """One tensor of the walk. `read` is collective; it returns the shard on the rank that writes it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    writer: int
    read: Callable[[], Tensor | None]

    def entries(self) -> Iterator[tuple[Piece, Entry]]:
        """The boxes this rank would write."""
        for piece in self.pieces:
            yield piece, Entry(f"{self.key}#{piece.number}", self.dtype, piece.box.size)


def save(model: nn.Module, states: EngineStates, topology: Topology, request: SaveRequest) -> None:
    """Writes a checkpoint. Collective over the world.

    Raises:
        CheckpointError: on every rank alike, with the reason. The last complete checkpoint is untouched, and so
            is the engine.
    """
    what, rank, start = f"saving checkpoint {request.folder}", dist.get_rank(), time.monotonic()
    tensors: list[LogicalTensor] = []
    items: list[_Item] = []
    state = b""
    generation = ""
    same_everywhere("saving a checkpoint", (str(request.folder), request.exclude_frozen))
    with agreed(what):
        tensors = logical_tensors(model, topology, rank)
        items = _items(model, tensors, states, request.exclude_frozen, rank)
        state = _serialized(request.state)
        request.folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            generation = next_generation(request.folder)
    _check_walk(what, items)
    generation = from_first(generation)
    path = request.folder / f"rank{rank:05d}{generation}.safetensors"
    facts, boxes = _write(what, path, items)
    index = _gathered(facts, boxes, items)
    failure: Exception | None = None
    staged = None
    if rank == 0:
        try:
            index = _completed(index, tensors, states, request)
            staged = _stage_index(index, request.folder, f"state{generation}.pt", state)
        except Exception as error:
            failure = error
    try:
        raise_together(what, failure)
    except CheckpointError:
        remove(path, request.folder / f"state{generation}.pt")
        raise
    with agreed(what):
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


def _items(
    model: nn.Module, tensors: list[LogicalTensor], states: EngineStates, exclude_frozen: bool, rank: int
) -> list[_Item]:
    """The walk, the same on every rank. Larger types first: readers map the files and want aligned tensors."""
    items = []
    for place, (name, buffer) in enumerate(persistent_buffers(model)):
        shape = tuple(buffer.shape)
        whole = (Piece(Box((0,) * len(shape), shape), (0,) * len(shape), 0),)
        read = _buffer_reader(buffer, place % dist.get_world_size(), rank)
        items.append(_Item(f"{BUFFER}/{name}", shape, buffer.dtype, whole, place % dist.get_world_size(), read))
    for tensor in tensors:
        if exclude_frozen and not tensor.parameter.requires_grad:
            continue
        place_ = states.place(tensor.parameter)
        for kind in (WEIGHT, *(sorted(place_.slot.kinds()) if place_.slot else ())):
            read = _reader(place_, kind, tensor.writer)
            dtype = place_.dtype(kind)
            items.append(_Item(f"{kind}/{tensor.name}", tensor.shape, dtype, tensor.pieces, tensor.writer, read))
    return sorted(items, key=lambda item: -item.dtype.itemsize)


def _reader(place: Any, kind: str, writer: int) -> Callable[[], Tensor | None]:
    return lambda: place.read(kind, writer)


def _buffer_reader(buffer: Tensor, writer: int, rank: int) -> Callable[[], Tensor | None]:
    return lambda: buffer if rank == writer else None


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


def _check_walk(what: str, items: list[_Item]) -> None:
    """All ranks have to walk the same tensors, or they would wait for one another for good."""
    walk = hashlib.sha256(repr([(item.key, item.shape, item.dtype) for item in items]).encode()).hexdigest()
    answers = everyone(walk)
    if any(answer != answers[0] for answer in answers):
        raise CheckpointError(f"{what}: ranks hold different optimizer states, by parameter, kind or type")


def _write(what: str, path: Path, items: list[_Item]) -> tuple[FileFacts | None, list[tuple[int, int, Box]]]:
    """Walks the tensors and writes this rank's boxes. Goes on walking after a failure: peers are waiting."""
    rank = dist.get_rank()
    failure: Exception | None = None
    file: TensorFile | None = None
    facts: FileFacts | None = None
    boxes: list[tuple[int, int, Box]] = []
    entries = [entry for item in items if item.writer == rank for _, entry in item.entries()]
    try:
        file = TensorFile(path, entries) if entries else None
    except Exception as error:
        failure = error
    for number, item in enumerate(items):
        shard = item.read()
        if shard is None or failure is not None or file is None:
            continue
        try:
            for piece, entry in item.entries():
                file.add(entry.key, piece.of(shard))
                boxes.append((number, piece.number, piece.box))
        except Exception as error:
            failure = error
    try:
        if file is not None and failure is None:
            facts = file.finish()
            sync_folder(path.parent)
    except Exception as error:
        failure = error
    try:
        raise_together(what, failure)
    except CheckpointError:
        if file is not None:
            file.close()
        remove(path)
        raise
    return facts, boxes


def _gathered(facts: FileFacts | None, boxes: list[tuple[int, int, Box]], items: list[_Item]) -> Index:
    """On rank 0, the tensors and files of all ranks; elsewhere an empty index."""
    rank, world = dist.get_rank(), dist.get_world_size()
    answers: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object((facts, boxes), answers, dst=0)
    index = Index({}, {}, {}, None, {}, {})
    if answers is None:
        return index
    stored: list[list[StoredBox]] = [[] for _ in items]
    for writer, (written, theirs) in enumerate(answers):
        name = f"rank{writer:05d}"
        if written is not None:
            index.files[name] = written
        for number, box_number, box in theirs:
            stored[number].append(StoredBox(box, name, f"{items[number].key}#{box_number}"))
    for item, found in zip(items, stored, strict=True):
        index.tensors[item.key] = StoredTensor(item.dtype, item.shape, tuple(found))
    return index


def _completed(index: Index, tensors: list[LogicalTensor], states: EngineStates, request: SaveRequest) -> Index:
    fault = index.fault()
    if fault:
        raise CheckpointError(f"the boxes the ranks hold are not the whole model: {fault}")
    excluded = [t.name for t in tensors if f"{WEIGHT}/{t.name}" not in index.tensors]
    frozen = [t.name for t in tensors if not t.parameter.requires_grad]
    index.parameters = {tensor.name: tensor.shape for tensor in tensors}
    index.optimizer = _optimizer_facts(tensors, states)
    index.engine = request.engine
    index.layout = request.layout
    index.extra = {"tag": request.tag, **request.extra, "frozen": frozen, "excluded": excluded}
    return index


def _optimizer_facts(tensors: list[LogicalTensor], states: EngineStates) -> dict[str, Any] | None:
    if states.optimizer_class is None:
        return None
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    scalars: dict[str, dict[str, float]] = {}
    for tensor in tensors:
        slot = states.place(tensor.parameter).slot
        if slot is None:
            continue
        own = settings(slot.group)
        if own not in groups:
            groups.append(own)
        group_of[tensor.name] = groups.index(own)
        scalars[tensor.name] = slot.scalars()
    return {"class": states.optimizer_class, "groups": groups, "group_of": group_of, "scalars": scalars}


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
