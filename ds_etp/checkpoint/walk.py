"""The walk of a save: which tensors there are, in what order a rank reads them, and who writes which boxes.

Ranks of one pipeline stage walk the same tensors, because reading one is collective over its ZeRO group. Stages hold
different ones, and of what several hold (tied weights) the first one's are saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.checkpoint.chunks import LocalChunk, LogicalTensor, persistent_buffers, whole_piece
from ds_etp.checkpoint.format import BUFFER, WEIGHT
from ds_etp.checkpoint.states import EngineStates
from ds_etp.checkpoint.writer import Entry
from ds_etp.errors import CheckpointError
from ds_etp.parallel.consensus import all_gather_object
from ds_etp.parallel.topology import Topology

# Key, unsharded shape and type of a tensor.
TensorMetadata = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class WriteItem:
    """One tensor of the walk. `read` is collective; it returns the shard on the rank that writes it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[LocalChunk, ...]
    writer: int
    read: Callable[[], Tensor | None]

    def entries(self) -> Iterator[tuple[LocalChunk, Entry]]:
        """The boxes this rank would write."""
        for piece in self.pieces:
            yield piece, Entry(f"{self.key}#{piece.number}", self.dtype, piece.box.size)


def own_items(
    model: nn.Module, tensors: list[LogicalTensor], states: EngineStates, exclude_frozen: bool, topology: Topology
) -> list[WriteItem]:
    """What this rank's stage holds, in the same order on each of its ranks.

    Larger types come first: readers map the files and want aligned tensors.
    """
    items, rank = [], dist.get_rank()
    stage = topology.stage_of(rank)
    for place, (name, buffer) in enumerate(persistent_buffers(model)):
        shape, writer = tuple(buffer.shape), stage[place % len(stage)]
        read = _buffer_reader(buffer, writer, rank)
        items.append(WriteItem(f"{BUFFER}/{name}", shape, buffer.dtype, (whole_piece(shape),), writer, read))
    for tensor in tensors:
        if exclude_frozen and not tensor.parameter.requires_grad:
            continue
        held = states.place(tensor.parameter)
        for kind in (WEIGHT, *(sorted(held.slot.kinds()) if held.slot else ())):
            read = _reader(held, kind, tensor.writer)
            items.append(
                WriteItem(f"{kind}/{tensor.name}", tensor.shape, held.dtype(kind), tensor.pieces, tensor.writer, read)
            )
    return sorted(items, key=lambda item: -item.dtype.itemsize)


def _reader(place: Any, kind: str, writer: int) -> Callable[[], Tensor | None]:
    return lambda: place.read(kind, writer)


def _buffer_reader(buffer: Tensor, writer: int, rank: int) -> Callable[[], Tensor | None]:
    return lambda: buffer if rank == writer else None


def agreed_walk(what: str, items: list[WriteItem], topology: Topology) -> tuple[list[WriteItem], list[TensorMetadata]]:
    """The walk of this rank, and everything that is saved. Collective over the world.

    Args:
        what: what is done, for the message.
        items: what this rank's stage holds.
        topology: how many stages there are.

    Returns:
        The items without those that an earlier stage saves, and the tensors of all stages, each once.

    Raises:
        CheckpointError: on every rank, where ranks of a stage would wait for one another for good.
    """
    facts: list[TensorMetadata] = [(item.key, item.shape, item.dtype) for item in items]
    walk = hashlib.sha256(repr(facts).encode()).hexdigest()
    firsts = topology.group_of("pp", 0)
    leads = topology.pp > 1 and dist.get_rank() in firsts
    answers = all_gather_object((walk, facts if leads else None))
    if any(answers[rank][0] != answers[topology.stage_of(rank)[0]][0] for rank in range(len(answers))):
        raise CheckpointError(f"{what}: ranks hold different optimizer states, by parameter, kind or type")
    if topology.pp == 1:
        return items, facts
    saved: dict[str, TensorMetadata] = {}
    owner: dict[str, int] = {}
    for stage, first in enumerate(firsts):
        for fact in answers[first][1]:
            known = saved.setdefault(fact[0], fact)
            owner.setdefault(fact[0], stage)
            if known != fact:
                raise CheckpointError(f"{what}: stages hold {fact[0]} in different shapes or types")
    own = topology.index_in("pp", dist.get_rank())
    return [item for item in items if owner[item.key] == own], list(saved.values())
