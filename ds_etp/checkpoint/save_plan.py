"""The save plan: an ordered list of write items, one for each tensor, each with the rank that writes it.

Every rank of a pipeline stage has the same items in the same order, since reading a tensor is an all-gather over its
ZeRO group. Pipeline stages hold different tensors; tied tensors, which several hold, are saved by the first of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.checkpoint.chunks import Chunk, LocalChunk, LogicalTensor, Shape, persistent_buffers, whole_chunk
from ds_etp.checkpoint.format import BUFFER, WEIGHT
from ds_etp.checkpoint.pipeline_stages import union_over_stages
from ds_etp.checkpoint.states import EngineStates, ParamState
from ds_etp.checkpoint.writer import TensorEntry
from ds_etp.errors import CheckpointError
from ds_etp.parallel.consensus import all_gather_object
from ds_etp.parallel.topology import Topology

# The chunks that a rank writes: key of the tensor, number of the chunk, the chunk.
WrittenChunks = list[tuple[str, int, Chunk]]


class TensorMetadata(NamedTuple):
    """A tensor's key `<state name>/<name>`, unsharded shape and dtype."""

    key: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class WriteItem:
    """One tensor of the save plan.

    Attributes:
        metadata: of the unsharded tensor.
        chunks: those that this rank holds, and writes if it is the writer.
        writer: the rank that writes them.
        read: collective over the tensor's ZeRO group; it returns the shard on the writer, None elsewhere.
    """

    metadata: TensorMetadata
    chunks: tuple[LocalChunk, ...]
    writer: int
    read: Callable[[], Tensor | None]

    def entries(self) -> Iterator[tuple[LocalChunk, TensorEntry]]:
        """The chunks this rank would write, each with its entry in the safetensors file."""
        for chunk in self.chunks:
            key = f"{self.metadata.key}#{chunk.number}"
            yield chunk, TensorEntry(key, self.metadata.dtype, chunk.logical.size)


def local_save_plan(
    model: nn.Module, tensors: list[LogicalTensor], states: EngineStates, exclude_frozen: bool, topology: Topology
) -> list[WriteItem]:
    """What this rank's pipeline stage holds, in the same order on each of its ranks.

    Larger dtypes come first: readers map the files and want aligned tensors.
    """
    items, rank = [], dist.get_rank()
    stage_ranks = topology.stage_of(rank)
    for index, (name, buffer) in enumerate(persistent_buffers(model)):
        metadata = TensorMetadata(f"{BUFFER}/{name}", tuple(buffer.shape), buffer.dtype)
        writer = stage_ranks[index % len(stage_ranks)]
        items.append(
            WriteItem(metadata, (whole_chunk(metadata.shape),), writer, _buffer_reader(buffer, writer == rank))
        )
    for tensor in tensors:
        if exclude_frozen and not tensor.parameter.requires_grad:
            continue
        state = states.param_state(tensor.parameter)
        optimizer_states = sorted(state.optimizer_tensor.state_dtypes()) if state.optimizer_tensor else ()
        for state_name in (WEIGHT, *optimizer_states):
            metadata = TensorMetadata(f"{state_name}/{tensor.name}", tensor.shape, state.dtype(state_name))
            read = _state_reader(state, state_name, tensor.writer)
            items.append(WriteItem(metadata, tensor.chunks, tensor.writer, read))
    return sorted(items, key=lambda item: -item.metadata.dtype.itemsize)


def written_chunks(items: list[WriteItem], rank: int) -> WrittenChunks:
    """What a rank writes."""
    return [
        (item.metadata.key, chunk.number, chunk.logical)
        for item in items
        if item.writer == rank
        for chunk in item.chunks
    ]


def _state_reader(state: ParamState, state_name: str, writer: int) -> Callable[[], Tensor | None]:
    return lambda: state.read(state_name, writer)


def _buffer_reader(buffer: Tensor, writes: bool) -> Callable[[], Tensor | None]:
    return lambda: buffer if writes else None


def global_save_plan(
    what: str, items: list[WriteItem], topology: Topology
) -> tuple[list[WriteItem], list[TensorMetadata]]:
    """This rank's write items, and the metadata of everything that is saved. Collective over the world.

    Args:
        what: what is done, for the message.
        items: this rank's local save plan.
        topology: how many pipeline stages there are.

    Returns:
        The items without those that an earlier pipeline stage saves, and the tensors of all pipeline stages, each once.

    Raises:
        CheckpointError: on every rank, where ranks of a pipeline stage would wait for one another for good.
    """
    own = [item.metadata for item in items]
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    first_ranks = topology.group_of("pp", 0)
    sends = topology.pp > 1 and dist.get_rank() in first_ranks
    answers = all_gather_object((digest, own if sends else None))
    if any(answers[rank][0] != answers[topology.stage_of(rank)[0]][0] for rank in range(len(answers))):
        raise CheckpointError(f"{what}: ranks hold different optimizer states, by parameter, name or type")
    if topology.pp == 1:
        return items, own
    by_stage = [
        {metadata.key: (stage, metadata) for metadata in answers[first][1]} for stage, first in enumerate(first_ranks)
    ]
    saved = union_over_stages(by_stage)
    for stage_tensors in by_stage:
        for key, (_, metadata) in stage_tensors.items():
            if saved[key][1] != metadata:
                raise CheckpointError(f"{what}: pipeline stages hold {key} in different shapes or types")
    own_stage = topology.index_in("pp", dist.get_rank())
    return [item for item in items if saved[item.metadata.key][0] == own_stage], [m for _, m in saved.values()]
