"""Logical tensors and the boxes of them that ranks hold.

A logical tensor is a parameter as Hugging Face knows it: unsharded, under its own name. A rank holds one or
more boxes of it, each an axis-aligned block: `start` and `size` per dimension. Two layouts of one model
differ only in their boxes, so that resharding is the intersection of boxes, and export is their assembly.

    for tensor in logical_tensors(engine.module, topology, rank):
        local = ...                                  # the rank's shard, gathered over its ZeRO group
        for piece in tensor.pieces:
            block = piece.of(local)                  # a view; it is `piece.box` of the logical tensor
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
Kind = Literal["expert", "tensor", "whole"]
# Over which group a parameter's boxes repeat. All ranks of the stage, where the kind is not listed.
_REPLICAS: dict[str, GroupKind] = {"expert": "expert_dp", "tensor": "dp"}
# What AutoTP (deepspeed 0.19.5 to 0.19.8) leaves on the parameters it has split.
_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: `size[d]` entries from `start[d]` on, along each dimension d."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        """How many entries it has."""
        return prod(self.size)

    def overlap(self, other: Chunk) -> Chunk | None:
        """The block that two boxes of one tensor share; None where they share nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Chunk(start, size) if all(n > 0 for n in size) else None

    def relative_to(self, origin: Shape) -> Chunk:
        """The same block counted from `origin`."""
        return Chunk(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.size)

    def slices(self) -> tuple[slice, ...]:
        """For indexing a tensor, or the result of safetensors' `get_slice`."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


@dataclass(frozen=True)
class LocalChunk:
    """One box that a rank holds, and where.

    Attributes:
        box: the block of the logical tensor.
        local_start: where that block begins in the rank's own (ZeRO-gathered) tensor.
        number: the box's number among all boxes of the tensor, the same on every replica.
    """

    box: Chunk
    local_start: Shape
    number: int

    def of(self, local: Tensor) -> Tensor:
        """The piece, a view of the rank's own tensor."""
        return local[Chunk(self.local_start, self.box.size).slices()]


def whole_piece(shape: Shape) -> LocalChunk:
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
        pieces: what this rank holds; together they are its whole local tensor.
        replicas: the ranks whose pieces count as these, in rank order. This rank is one of them, but for what every
            etp rank holds and rank 0 adds.
        writer: the one of them that writes the pieces to a checkpoint.
    """

    name: str
    shape: Shape
    local_shape: Shape
    kind: Kind
    parameter: nn.Parameter
    pieces: tuple[LocalChunk, ...]
    replicas: tuple[int, ...]
    writer: int


def logical_tensors(model: nn.Module, topology: Topology, rank: int) -> list[LogicalTensor]:
    """Every parameter of an engine's module, in `named_parameters()` order, the same on every rank of a stage.

    Args:
        model: the module, its experts sharded by ds_etp and perhaps split by AutoTP; or neither. Of a pipeline, a
            stage.
        topology: the sizes it is split by.
        rank: whose boxes to list.

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
    for place, (name, parameter) in enumerate(model.named_parameters()):
        local = full_shape(parameter)
        meta = getattr(parameter, _AUTOTP_META, None)
        kind: Kind = "whole"
        shape = local
        pieces: tuple[LocalChunk, ...] = (whole_piece(local),)
        if name in experts:
            kind = "expert"
            layout, shard = experts[name]
            shape, pieces = layout.shape, expert_pieces(layout, shard)
        elif meta is not None and not meta.get("replicated") and topology.tp > 1:
            kind = "tensor"
            shape, pieces = _autotp_pieces(name, meta, local, topology, topology.index_in("tp", rank))
        replicas = topology.group_of(_REPLICAS[kind], rank) if kind in _REPLICAS else tuple(topology.stage_of(rank))
        if name in experts and experts[name][0].dim is None:
            # All etp ranks hold it, and what rank 0 holds counts.
            replicas = topology.group_of("expert_dp", topology.group_of("expt_tp", rank)[0])
        writer = replicas[place % len(replicas)]
        tensors.append(LogicalTensor(hub_name(name), shape, local, kind, parameter, pieces, replicas, writer))
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
    """What rank `index` holds of a tensor whose dimension `dim` is cut block by block.

    Args:
        shape: the unsharded shape.
        dim: the dimension that is cut.
        widths: `widths[block][rank]`, in entries of `dim`; a rank's tensor has its share of each block in turn.
        index: whose pieces to list.

    Returns:
        One piece for each block that the rank holds something of.
    """
    pieces = []
    logical = local = 0
    for block, shares in enumerate(widths):
        if shares[index]:
            start, size, local_start = [0] * len(shape), list(shape), [0] * len(shape)
            start[dim], size[dim], local_start[dim] = logical + sum(shares[:index]), shares[index], local
            box = Chunk(tuple(start), tuple(size))
            pieces.append(LocalChunk(box, tuple(local_start), index * len(widths) + block))
        logical += sum(shares)
        local += shares[index]
    return tuple(pieces)


def expert_pieces(layout: ParameterLayout, shard: Shard) -> tuple[LocalChunk, ...]:
    """What a rank holds of one parameter of its experts."""
    rows, columns = layout.widths(shard.topology)
    if columns is None or layout.dim is None:
        return shard_chunks(layout.shape, 0, rows, shard.ep_index)
    across = shard_chunks(layout.shape, layout.dim, columns, shard.etp_index)
    pieces = []
    for row in shard_chunks(layout.shape, 0, rows, shard.ep_index):
        for column in across:
            box = row.box.overlap(column.box)
            assert box is not None
            local_start = (row.local_start[0], *column.local_start[1:])
            number = row.number * len(columns) * shard.topology.etp + column.number
            pieces.append(LocalChunk(box, local_start, number))
    return tuple(pieces)


def _autotp_pieces(
    name: str, meta: dict[str, Any], local: Shape, topology: Topology, index: int
) -> tuple[Shape, tuple[LocalChunk, ...]]:
    shape: Any = meta.get("logical_shape") or meta.get("original_shape")
    dim: Any = meta.get("partition_dim")
    widths: Any = meta.get("sub_param_shard_widths") or [meta.get("partition_sizes")]
    if None not in (shape, dim, widths[0]) and not meta.get("unsupported_reason"):
        pieces = shard_chunks(tuple(shape), dim, widths, index)
        held = (*shape[:dim], sum(shares[index] for shares in widths), *shape[dim + 1 :])
        if held == local and sum(map(sum, widths)) == shape[dim]:
            return tuple(shape), pieces
    raise CheckpointError(
        f"{name}: AutoTP has split it over tensor_parallel.autotp_size={topology.tp} in a way it does not "
        f"describe ({meta.get('unsupported_reason') or meta}), so that it cannot be put together again."
    )


@dataclass(frozen=True)
class Copy:
    """A block to copy from a stored box to a wanted one, counted from the start of each.

    Attributes:
        source, target: places in the lists of stored and of wanted boxes.
        read: the block, counted from the start of the stored box.
        write: the same block, counted from the start of the wanted box.
    """

    source: int
    target: int
    read: Chunk
    write: Chunk


def read_plan(stored: Sequence[Chunk], wanted: Sequence[Chunk]) -> Iterator[Copy]:
    """What to copy where, so that the wanted boxes are filled from the stored ones of the same tensor.

    Where the stored boxes tile the tensor, every entry of every wanted box is written once.
    """
    for target, want in enumerate(wanted):
        for source, have in enumerate(stored):
            shared = have.overlap(want)
            if shared is not None:
                yield Copy(source, target, shared.relative_to(have.start), shared.relative_to(want.start))


def coverage_error(shape: Shape, boxes: Iterable[Chunk]) -> str | None:
    """What keeps boxes from covering a tensor exactly once, in words; None where they do.

    Boxes of a regular cut are one cell each of the grid that all their edges make, so that this takes time
    in proportion to their number.
    """
    boxes = list(boxes)
    for box in boxes:
        inside = len(box.start) == len(box.size) == len(shape) and all(
            a >= 0 and n > 0 and a + n <= total for a, n, total in zip(box.start, box.size, shape, strict=True)
        )
        if not inside:
            return f"the box at {box.start} of size {box.size} is not inside {shape}"
    edges = [
        sorted({0, total, *(b.start[d] for b in boxes), *(b.start[d] + b.size[d] for b in boxes)})
        for d, total in enumerate(shape)
    ]
    places = [{edge: place for place, edge in enumerate(line)} for line in edges]
    cells: set[Shape] = set()
    for box in boxes:
        lines = zip(places, box.start, box.size, strict=True)
        spans = [range(place[a], place[a + n]) for place, a, n in lines]
        for cell in product(*spans):
            if cell in cells:
                return f"the box at {box.start} of size {box.size} covers what another box covers"
            cells.add(cell)
    if len(cells) != prod(len(line) - 1 for line in edges):
        return f"{len(boxes)} boxes cover {sum(box.numel for box in boxes)} of {prod(shape)} entries"
    return None
