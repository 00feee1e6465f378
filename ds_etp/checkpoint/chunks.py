"""Chunks of logical tensors: which of them ranks hold, the read plan from stored to wanted chunks, and coverage.

A logical tensor is a parameter as Hugging Face knows it: unsharded, under its own name. A rank holds one or more
chunks of it: `start` and `size` per dimension, as DCP's ChunkStorageMetadata has `offsets` and `sizes`. Two layouts of
one model differ only in their chunks: resharding is the intersection of chunks, and export is their assembly.

    for tensor in logical_tensors(engine.module, topology, rank):
        local = ...                                  # the rank's shard, gathered over its ZeRO group
        for chunk in tensor.chunks:
            values = chunk.of(local)                 # a view; it is `chunk.logical` of the logical tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from torch import Tensor, nn

from ds_etp.checkpoint.names import HubNames
from ds_etp.errors import CheckpointError
from ds_etp.experts.layout import ParameterLayout, full_shape
from ds_etp.experts.sharded import Shard, sharded_modules
from ds_etp.parallel.topology import GroupKind, Topology

Shape = tuple[int, ...]
ShardKind = Literal["expert", "tensor", "whole"]
# Over which group a parameter's chunks repeat. All ranks of the pipeline stage, where the kind is not listed.
_REPLICAS: dict[str, GroupKind] = {"expert": "expert_dp", "tensor": "dp"}
# What AutoTP (deepspeed 0.19.5 to 0.19.8) leaves on the parameters it has split.
_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor: `size[d]` entries from `start[d]` on, along each dimension d."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        """How many entries it has."""
        return prod(self.size)

    def overlap(self, other: Chunk) -> Chunk | None:
        """The region that two chunks of one tensor share; None where they share nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Chunk(start, size) if all(n > 0 for n in size) else None

    def relative_to(self, origin: Shape) -> Chunk:
        """The same region counted from `origin`."""
        return Chunk(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.size)

    def slices(self) -> tuple[slice, ...]:
        """For indexing a tensor, or the result of safetensors' `get_slice`."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


@dataclass(frozen=True)
class LocalChunk:
    """A chunk that a rank holds, and where.

    Attributes:
        logical: the chunk of the logical tensor.
        local_start: where that chunk begins in the rank's own (ZeRO-gathered) tensor.
        number: the chunk's number among all chunks of the tensor, the same on every replica.
    """

    logical: Chunk
    local_start: Shape
    number: int

    def of(self, local: Tensor) -> Tensor:
        """Its values, a view of the rank's own tensor."""
        return local[Chunk(self.local_start, self.logical.size).slices()]


def whole_chunk(shape: Shape) -> LocalChunk:
    """All of a tensor, held by one rank."""
    origin = (0,) * len(shape)
    return LocalChunk(Chunk(origin, shape), origin, 0)


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter, its unsharded shape and what this rank holds of it.

    Attributes:
        name: the Hugging Face name.
        shape: the unsharded shape.
        local_shape: the shape of this rank's shard, before ZeRO partitions it further.
        kind: how it is split: `expert` over etp and ep, `tensor` over tp by AutoTP, `whole` not at all.
        parameter: the parameter itself; ZeRO-3 may have it partitioned.
        chunks: what this rank holds; together they are its whole local tensor.
        replicas: the ranks whose chunks count as these, in rank order. This rank is one of them, but for what every
            etp rank holds and rank 0 adds.
        writer: the one of them that writes the chunks to a checkpoint.
    """

    name: str
    shape: Shape
    local_shape: Shape
    kind: ShardKind
    parameter: nn.Parameter
    chunks: tuple[LocalChunk, ...]
    replicas: tuple[int, ...]
    writer: int


def logical_tensors(model: nn.Module, topology: Topology, rank: int) -> list[LogicalTensor]:
    """Every parameter of an engine's module, in `named_parameters()` order, the same on every rank of a pipeline
    stage.

    Args:
        model: the module, its experts sharded by ds_etp and perhaps split by AutoTP; or neither. Of a pipeline, its
            stage.
        topology: the sizes it is split by.
        rank: whose chunks to list.

    Raises:
        CheckpointError: AutoTP has split a parameter in a way it doesn't describe.
    """
    experts: dict[str, tuple[ParameterLayout, Shard]] = {
        f"{path}.{name}": (module.ds_etp_shard.layout.parameters[name], module.ds_etp_shard)
        for path, module in sharded_modules(model)
        for name, _ in module.named_parameters()
    }
    hub_name = HubNames(model)
    tensors = []
    for index, (name, parameter) in enumerate(model.named_parameters()):
        local = full_shape(parameter)
        meta = getattr(parameter, _AUTOTP_META, None)
        kind: ShardKind = "whole"
        shape = local
        chunks: tuple[LocalChunk, ...] = (whole_chunk(local),)
        if name in experts:
            kind = "expert"
            layout, shard = experts[name]
            shape, chunks = layout.shape, expert_chunks(layout, shard)
        elif meta is not None and not meta.get("replicated") and topology.tp > 1:
            kind = "tensor"
            shape, chunks = _autotp_chunks(name, meta, local, topology, topology.index_in("tp", rank))
        replicas = topology.group_of(_REPLICAS[kind], rank) if kind in _REPLICAS else tuple(topology.stage_of(rank))
        if name in experts and experts[name][0].dim is None:
            # All etp ranks hold it, and what rank 0 holds counts.
            replicas = topology.group_of("expert_dp", topology.group_of("expt_tp", rank)[0])
        writer = replicas[index % len(replicas)]
        tensors.append(LogicalTensor(hub_name(name), shape, local, kind, parameter, chunks, replicas, writer))
    return tensors


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to a model's state, each once, by Hugging Face name."""
    seen: set[int] = set()
    hub_name = HubNames(model)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield hub_name(f"{path}.{name}" if path else name), buffer


def shard_chunks(shape: Shape, dim: int, widths: Sequence[Sequence[int]], index: int) -> tuple[LocalChunk, ...]:
    """What rank `index` holds of a tensor whose dimension `dim` is split block by block.

    Args:
        shape: the unsharded shape.
        dim: the dimension that is split.
        widths: `widths[block][rank]`, in entries of `dim`; a rank's tensor has its share of each block in turn.
        index: whose chunks to list.

    Returns:
        One chunk for each block that the rank holds something of.
    """
    chunks = []
    logical = local = 0
    for block, shares in enumerate(widths):
        if shares[index]:
            start, size, local_start = [0] * len(shape), list(shape), [0] * len(shape)
            start[dim], size[dim], local_start[dim] = logical + sum(shares[:index]), shares[index], local
            chunks.append(LocalChunk(Chunk(tuple(start), tuple(size)), tuple(local_start), index * len(widths) + block))
        logical += sum(shares)
        local += shares[index]
    return tuple(chunks)


def expert_chunks(layout: ParameterLayout, shard: Shard) -> tuple[LocalChunk, ...]:
    """What a rank holds of one parameter of its experts."""
    rows, columns = layout.widths(shard.topology)
    if columns is None or layout.dim is None:
        return shard_chunks(layout.shape, 0, rows, shard.ep_index)
    across = shard_chunks(layout.shape, layout.dim, columns, shard.etp_index)
    chunks = []
    for row in shard_chunks(layout.shape, 0, rows, shard.ep_index):
        for column in across:
            logical = row.logical.overlap(column.logical)
            assert logical is not None
            local_start = (row.local_start[0], *column.local_start[1:])
            number = row.number * len(columns) * shard.topology.etp + column.number
            chunks.append(LocalChunk(logical, local_start, number))
    return tuple(chunks)


def _autotp_chunks(
    name: str, meta: dict[str, Any], local: Shape, topology: Topology, index: int
) -> tuple[Shape, tuple[LocalChunk, ...]]:
    shape: Any = meta.get("logical_shape") or meta.get("original_shape")
    dim: Any = meta.get("partition_dim")
    widths: Any = meta.get("sub_param_shard_widths") or [meta.get("partition_sizes")]
    if "partition_sizes" not in meta and meta.get("sub_param_shape") is None and None not in (shape, dim):
        # DeepSpeed before 0.19.8 doesn't list them. Where every rank has this width, there is one way to cut.
        widths = [[shape[dim] // topology.tp] * topology.tp]
    if None not in (shape, dim, widths[0]) and not meta.get("unsupported_reason"):
        chunks = shard_chunks(tuple(shape), dim, widths, index)
        expected = (*shape[:dim], sum(shares[index] for shares in widths), *shape[dim + 1 :])
        if expected == local and sum(map(sum, widths)) == shape[dim]:
            return tuple(shape), chunks
    raise CheckpointError(
        f"{name}: AutoTP has split it over tensor_parallel.autotp_size={topology.tp} in a way it does not "
        f"describe ({meta.get('unsupported_reason') or meta}), so that it cannot be put together again."
    )


@dataclass(frozen=True)
class ReadItem:
    """What a stored chunk and a wanted one share.

    Attributes:
        stored_index, wanted_index: places in the lists of stored and of wanted chunks.
        stored_chunk: what they share, counted from the start of the stored chunk.
        wanted_chunk: the same, counted from the start of the wanted chunk.
    """

    stored_index: int
    wanted_index: int
    stored_chunk: Chunk
    wanted_chunk: Chunk


def read_plan(stored: Sequence[Chunk], wanted: Sequence[Chunk]) -> Iterator[ReadItem]:
    """The read items by which the wanted chunks are filled from the stored ones of the same tensor.

    Where the stored chunks tile the tensor, every entry of every wanted chunk is written once.
    """
    for wanted_index, want in enumerate(wanted):
        for stored_index, have in enumerate(stored):
            shared = have.overlap(want)
            if shared is not None:
                yield ReadItem(
                    stored_index, wanted_index, shared.relative_to(have.start), shared.relative_to(want.start)
                )


def coverage_error(shape: Shape, chunks: Iterable[Chunk]) -> str | None:
    """What keeps chunks from covering a tensor exactly once, in words; None where they do.

    Chunks of a regular cut are one cell each of the grid that all their edges make, so that this takes time
    in proportion to their number.
    """
    chunks = list(chunks)
    for chunk in chunks:
        inside = len(chunk.start) == len(chunk.size) == len(shape) and all(
            a >= 0 and n > 0 and a + n <= total for a, n, total in zip(chunk.start, chunk.size, shape, strict=True)
        )
        if not inside:
            return f"the chunk at {chunk.start} of size {chunk.size} is not inside {shape}"
    edges = [
        sorted({0, total, *(b.start[d] for b in chunks), *(b.start[d] + b.size[d] for b in chunks)})
        for d, total in enumerate(shape)
    ]
    places = [{edge: place for place, edge in enumerate(line)} for line in edges]
    cells: set[Shape] = set()
    for chunk in chunks:
        lines = zip(places, chunk.start, chunk.size, strict=True)
        spans = [range(place[a], place[a + n]) for place, a, n in lines]
        for cell in product(*spans):
            if cell in cells:
                return f"the chunk at {chunk.start} of size {chunk.size} covers what another chunk covers"
            cells.add(cell)
    if len(cells) != prod(len(line) - 1 for line in edges):
        return f"{len(chunks)} chunks cover {sum(chunk.numel for chunk in chunks)} of {prod(shape)} entries"
    return None
