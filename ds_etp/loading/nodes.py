"""Nodes of a lazy tensor: files' tensors, and casts, concatenations, slices, permutations and reshapes of other nodes.

A node fills any chunk of its tensor alone: it asks for chunks of the nodes it is made of, down to the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_etp.checkpoint.chunks import Chunk, Shape


class Node(Protocol):
    """How a tensor is made of files' tensors."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def fill(self, out: Tensor, chunk: Chunk) -> None:
        """Writes a chunk of the tensor to `out`, of the chunk's size, in `out`'s dtype."""


@dataclass(frozen=True)
class FileTensor:
    """What a file holds: a tensor that is mapped, of which only the pages that are looked at are read."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def fill(self, out: Tensor, chunk: Chunk) -> None:
        out.copy_(self.tensor[chunk.slices()])


@dataclass(frozen=True)
class Cast:
    """A tensor in another dtype."""

    of: Node
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.of.shape

    def fill(self, out: Tensor, chunk: Chunk) -> None:
        if out.dtype == self.dtype:
            self.of.fill(out, chunk)
        else:  # it is rounded to this type first
            between = torch.empty(chunk.size, dtype=self.dtype)
            self.of.fill(between, chunk)
            out.copy_(between)


@dataclass(frozen=True)
class Concat:
    """Tensors one after the other along a dimension."""

    parts: tuple[Node, ...]
    dim: int

    @property
    def shape(self) -> Shape:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def fill(self, out: Tensor, chunk: Chunk) -> None:
        start = 0
        for part in self.parts:
            origin = tuple(start if dim == self.dim else 0 for dim in range(len(chunk.size)))
            wanted = Chunk(origin, part.shape).overlap(chunk)
            if wanted is not None:
                part.fill(out[wanted.relative_to(chunk.start).slices()], wanted.relative_to(origin))
            start += part.shape[self.dim]


@dataclass(frozen=True)
class Slice:
    """A chunk of a tensor."""

    of: Node
    chunk: Chunk

    @property
    def shape(self) -> Shape:
        return self.chunk.size

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def fill(self, out: Tensor, chunk: Chunk) -> None:
        start = tuple(a + b for a, b in zip(self.chunk.start, chunk.start, strict=True))
        self.of.fill(out, Chunk(start, chunk.size))


@dataclass(frozen=True)
class Permute:
    """A tensor with its dimensions in another order: `order[d]` is where dimension d comes from.

    None: a dimension of size 1 that is new. Dimensions of size 1 that no entry names are dropped.
    """

    of: Node
    order: tuple[int | None, ...]

    @property
    def shape(self) -> Shape:
        return tuple(1 if source is None else self.of.shape[source] for source in self.order)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def fill(self, out: Tensor, chunk: Chunk) -> None:
        start, size = [0] * len(self.of.shape), [1] * len(self.of.shape)
        for dim, source in enumerate(self.order):
            if source is not None:
                start[source], size[source] = chunk.start[dim], chunk.size[dim]
        kept = [(dim, source) for dim, source in enumerate(self.order) if source is not None]
        for dim in reversed(range(len(self.order))):
            if self.order[dim] is None:
                out = out.select(dim, 0)
        places = [source for _, source in kept]
        out = out.permute([places.index(source) for source in sorted(places)])
        for source in range(len(self.of.shape)):
            if source not in places:
                out = out.unsqueeze(source)
        self.of.fill(out, Chunk(tuple(start), tuple(size)))


@dataclass(frozen=True)
class Reshape:
    """A tensor in another shape. All of it is made, whatever chunk is asked for."""

    of: Node
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def fill(self, out: Tensor, chunk: Chunk) -> None:
        out.copy_(materialize(self.of).reshape(self.shape)[chunk.slices()])


def materialize(node: Node) -> Tensor:
    """All of a node's tensor: the mapped one, where a file holds it as it is."""
    if isinstance(node, FileTensor):
        return node.tensor
    out = torch.empty(node.shape, dtype=node.dtype)
    node.fill(out, Chunk((0,) * len(node.shape), node.shape))
    return out
