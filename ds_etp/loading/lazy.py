"""Tensors that remember how they are made of others, so that any block of them can be made alone.

A model's files hold its experts in another form than the model does: one tensor for each expert, gate and up apart,
transposed. What turns one into the other is transformers' business. Its operations run on these tensors without
touching data, and a block of the result asks for blocks of what it is made of, down to the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_etp.checkpoint.chunks import Chunk, Shape


class Node(Protocol):
    """One step on the way from files to a tensor."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def fill(self, out: Tensor, box: Chunk) -> None:
        """Writes a block of the tensor to `out`, of the block's size, in `out`'s type."""


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

    def fill(self, out: Tensor, box: Chunk) -> None:
        out.copy_(self.tensor[box.slices()])


@dataclass(frozen=True)
class Cast:
    """A tensor in another type."""

    of: Node
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.of.shape

    def fill(self, out: Tensor, box: Chunk) -> None:
        if out.dtype == self.dtype:
            self.of.fill(out, box)
        else:  # it is rounded to this type first
            between = torch.empty(box.size, dtype=self.dtype)
            self.of.fill(between, box)
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

    def fill(self, out: Tensor, box: Chunk) -> None:
        start = 0
        for part in self.parts:
            origin = tuple(start if dim == self.dim else 0 for dim in range(len(box.size)))
            wanted = Chunk(origin, part.shape).overlap(box)
            if wanted is not None:
                part.fill(out[wanted.relative_to(box.start).slices()], wanted.relative_to(origin))
            start += part.shape[self.dim]


@dataclass(frozen=True)
class Slice:
    """A block of a tensor."""

    of: Node
    box: Chunk

    @property
    def shape(self) -> Shape:
        return self.box.size

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def fill(self, out: Tensor, box: Chunk) -> None:
        start = tuple(a + b for a, b in zip(self.box.start, box.start, strict=True))
        self.of.fill(out, Chunk(start, box.size))


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

    def fill(self, out: Tensor, box: Chunk) -> None:
        start, size = [0] * len(self.of.shape), [1] * len(self.of.shape)
        for dim, source in enumerate(self.order):
            if source is not None:
                start[source], size[source] = box.start[dim], box.size[dim]
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
class Reshaped:
    """A tensor in another shape. All of it is made, whatever block is asked for."""

    of: Node
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def fill(self, out: Tensor, box: Chunk) -> None:
        out.copy_(whole(self.of).reshape(self.shape)[box.slices()])


def whole(node: Node) -> Tensor:
    """All of a tensor: the mapped one, where a file holds it as it is."""
    if isinstance(node, FileTensor):
        return node.tensor
    out = torch.empty(node.shape, dtype=node.dtype)
    node.fill(out, Chunk((0,) * len(node.shape), node.shape))
    return out


class LazyTensor(Tensor):
    """A tensor without data, of which blocks can be made. What it can't do lazily is done on all of its data."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> LazyTensor:
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, node.shape, dtype=node.dtype)
        made.node = node
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change a tensor that is not read yet")
        step = _STEPS.get(func)
        if step is not None:
            if step is not _to:
                # Torch's own check of the arguments: tensors that don't fit together are an error here already.
                checked_args, checked_kwargs = tree_map(_meta, (args, kwargs))
                func(*checked_args, **checked_kwargs)
            made = step(*args, **kwargs)
            if made is not None:
                return made
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        return func(*real_args, **real_kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"


def _real(value: Any) -> Any:
    return whole(value.node) if isinstance(value, LazyTensor) else value


def _meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _node(value: Tensor) -> Node:
    return value.node if isinstance(value, LazyTensor) else FileTensor(value)


def _same(x: LazyTensor, **_: Any) -> LazyTensor:
    return LazyTensor(x.node)


def _to(x: LazyTensor, *, dtype: Any = None, device: Any = None, **_: Any) -> LazyTensor | None:
    if device is not None and torch.device(device).type != "cpu":
        return None
    return LazyTensor(x.node if dtype in (None, x.dtype) else Cast(x.node, dtype))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> LazyTensor | None:
    if len({tensor.dtype for tensor in tensors}) > 1 or len({tensor.dim() for tensor in tensors}) > 1:
        return None
    return LazyTensor(Concat(tuple(map(_node, tensors)), dim % tensors[0].dim()))


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> LazyTensor | None:
    place = dim % (tensors[0].dim() + 1)
    return _cat([_unsqueeze(LazyTensor(_node(tensor)), place) for tensor in tensors], place)


def _unsqueeze(x: LazyTensor, dim: int) -> LazyTensor:
    order: list[int | None] = list(range(x.dim()))
    order.insert(dim % (x.dim() + 1), None)
    return LazyTensor(Permute(x.node, tuple(order)))


def _squeeze(x: LazyTensor, dim: int) -> LazyTensor:
    dim %= x.dim()
    if x.shape[dim] != 1:
        return LazyTensor(x.node)
    return LazyTensor(Permute(x.node, tuple(d for d in range(x.dim()) if d != dim)))


def _permute(x: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    return LazyTensor(Permute(x.node, tuple(dim % x.dim() for dim in dims)))


def _transpose(x: LazyTensor, first: int, second: int) -> LazyTensor:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return _permute(x, order)


def _narrow(x: LazyTensor, dim: int, start: int, size: int) -> LazyTensor:
    starts, sizes = [0] * x.dim(), list(x.shape)
    starts[dim], sizes[dim] = start, size
    return LazyTensor(Slice(x.node, Chunk(tuple(starts), tuple(sizes))))


def _slice(x: LazyTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> LazyTensor | None:
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return _narrow(x, dim, first, max(last - first, 0)) if step == 1 else None


def _select(x: LazyTensor, dim: int, index: int) -> LazyTensor:
    return _squeeze(_narrow(x, dim, index % x.shape[dim], 1), dim)


def _split(x: LazyTensor, size: int, dim: int = 0) -> list[LazyTensor]:
    total = x.shape[dim]
    return [_narrow(x, dim, start, min(size, total - start)) for start in range(0, total, size)]


def _split_sizes(x: LazyTensor, sizes: Sequence[int], dim: int = 0) -> list[LazyTensor]:
    return [_narrow(x, dim, sum(sizes[:place]), size) for place, size in enumerate(sizes)]


def _view(x: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    full = torch.empty(x.shape, device="meta").view(shape).shape
    return LazyTensor(Reshaped(x.node, tuple(full)))


_aten = torch.ops.aten
# Anything that isn't here is done on the data. It is the same result, and takes the memory of all of it.
_STEPS: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten._to_copy.default: _to,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
}
