"""`LazyTensor`: a tensor subclass that records operations as nodes, so that any chunk of the result can be made alone.

A model's files hold its experts in another form than the model does: one tensor for each expert, gate and up apart,
transposed. What turns one into the other is transformers' business. Its operations run on these tensors without
touching data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_etp.checkpoint.chunks import Chunk
from ds_etp.loading.nodes import Cast, Concat, FileTensor, Node, Permute, Reshape, Slice, materialize


class LazyTensor(Tensor):
    """A tensor without data, of which chunks can be made. What it can't do lazily is done on all of its data."""

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
        lazy_op = _LAZY_OPS.get(func)
        if lazy_op is not None:
            if lazy_op is not _to:
                # Torch's own check of the arguments: tensors that don't fit together are an error here already.
                checked_args, checked_kwargs = tree_map(_meta, (args, kwargs))
                func(*checked_args, **checked_kwargs)
            made = lazy_op(*args, **kwargs)
            if made is not None:
                return made
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        return func(*real_args, **real_kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"


def _real(value: Any) -> Any:
    return materialize(value.node) if isinstance(value, LazyTensor) else value


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
    return LazyTensor(Reshape(x.node, tuple(full)))


_aten = torch.ops.aten
# Anything that isn't here is done on the data. It is the same result, and takes the memory of all of it.
_LAZY_OPS: dict[Any, Callable[..., Any]] = {
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
