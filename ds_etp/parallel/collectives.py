"""Raw collectives over rows, without autograd: what `autograd` and `async_ops` are made of.

Legend: T tokens a rank holds, t tokens it owns. All tensors are rows: `[rows, ...]`. Several tensors of the
same rows travel in one message; peers may bring different numbers of rows.

Plain `torch.distributed` on contiguous tensors throughout: DeepSpeed's shared-memory all-reduce on CPU
ignores the group it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.parallel.process_groups import ProcessGroupInfo

# Named anew in torch 2.13, which warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_WORD = 8  # bytes of the widest dtype that is sent: rows of a message are made of words of it


def balanced_splits(rows: int, parts: int) -> list[int]:
    """How many of `rows` rows each of `parts` peers owns: as even as can be, the longer ones first."""
    quotient, rest = divmod(rows, parts)
    return [quotient + (part < rest) for part in range(parts)]


def pack_columns(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Tensors of the same rows as one `[rows, words]` message of int64, in `out` where given."""
    columns, words = _columns(tensors)
    message = tensors[0].new_empty(len(tensors[0]), words, dtype=torch.int64) if out is None else out
    for tensor, (start, stop) in zip(tensors, columns, strict=True):
        part = message.view(torch.uint8)[:, start:stop].view(tensor.dtype)
        part.copy_(tensor.reshape(len(tensor), _width(tensor)))
    return message


def gather_columns(tensors: Sequence[Tensor], rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Some rows of tensors, as `pack_columns` packs them, read and written once. Not for autograd."""
    columns, words = _columns(tensors)
    message = tensors[0].new_empty(len(rows), words, dtype=torch.int64) if out is None else out
    for tensor, (start, stop) in zip(tensors, columns, strict=True):
        part = message.view(torch.uint8)[:, start:stop].view(tensor.dtype)
        torch.index_select(tensor.reshape(len(tensor), _width(tensor)), 0, rows, out=part)
    return message


def packed_width(tensors: Sequence[Tensor]) -> int:
    """The words of a message row."""
    return _columns(tensors)[1]


def unpack_views(message: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of a message as views of it, each with the dtype and trailing shape of its model in `like`."""
    return tuple(
        message.view(torch.uint8)[:, start:stop].view(tensor.dtype).unflatten(1, tensor.shape[1:])
        for tensor, (start, stop) in zip(like, _columns(like)[0], strict=True)
    )


def _columns(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """The bytes of each tensor's part of a message row, aligned so that it can be viewed, and the words of a row."""
    columns, end = [], 0
    for tensor in tensors:
        start = -(-end // tensor.element_size()) * tensor.element_size()
        end = start + _width(tensor) * tensor.element_size()
        columns.append((start, end))
    return columns, -(-end // _WORD)


def _width(tensor: Tensor) -> int:
    """Elements of one row, also of a tensor that has none."""
    return prod(tensor.shape[1:])


def _unpack(message: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(view.clone(memory_format=torch.contiguous_format) for view in unpack_views(message, like))


def all_gather_rows(tensors: Sequence[Tensor], sizes: Sequence[int], peers: ProcessGroupInfo) -> tuple[Tensor, ...]:
    """Every peer's rows, in peer order. Peer i brings `sizes[i]` rows."""
    if peers.size == 1:
        return tuple(tensors)
    single = len(tensors) == 1
    message = tensors[0].contiguous() if single else pack_columns(tensors)
    longest = max(sizes)
    out = all_gather_padded(message, longest, peers)
    out = unpadded(out, sizes)
    return (out,) if single else _unpack(out, tensors)


def all_gather_padded(message: Tensor, longest: int, peers: ProcessGroupInfo, out: Tensor | None = None) -> Tensor:
    """Every peer's rows, peer i's from row `i * longest` on. Rows beyond a peer's own hold anything.

    `out`: where they go, if there is a message.
    """
    if peers.size == 1:
        return message
    if out is None:
        out = message.new_empty(longest * peers.size, *message.shape[1:])
    all_gather_single(out, pad_rows(message, longest), group=peers.group)
    return out


def pad_rows(rows: Tensor, length: int) -> Tensor:
    """Rows, and zeros up to `length` of them."""
    if len(rows) == length:
        return rows
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def padded(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Runs of rows, `sizes[i]` of peer i, each as long as the longest."""
    longest = max(sizes)
    if min(sizes) == longest:
        return rows
    return torch.cat([pad_rows(part, longest) for part in rows.split(list(sizes))])


def unpadded(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """The reverse of `padded`."""
    longest = max(sizes)
    if min(sizes) == longest:
        return rows
    return torch.cat([part[:size] for part, size in zip(rows.split(longest), sizes, strict=True)])


def reduce_scatter_rows(
    tensors: Sequence[Tensor], sizes: Sequence[int], peers: ProcessGroupInfo, dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """This rank's rows of the sum over peers. Each tensor holds the union, `sum(sizes)` rows."""
    if peers.size == 1:
        return tuple(tensors)
    longest = max(sizes)

    def reduce(message: Tensor) -> Tensor:
        message = padded(message, sizes)
        out = message.new_empty(longest, *message.shape[1:])
        reduce_scatter_single(out, message, group=peers.group)
        return out[: sizes[peers.index]]

    return _reduced(tensors, dtype, reduce)


def reduce_scatter_padded(tensors: Sequence[Tensor], longest: int, peers: ProcessGroupInfo) -> tuple[Tensor, ...]:
    """This rank's `longest` rows of the sum over peers. Each tensor holds as many for each peer, in peer order."""
    if peers.size == 1:
        return tuple(tensors)

    def reduce(message: Tensor) -> Tensor:
        out = message.new_empty(longest, *message.shape[1:])
        reduce_scatter_single(out, message, group=peers.group)
        return out

    return _reduced(tensors, None, reduce)


def all_reduce_rows(
    tensors: Sequence[Tensor], peers: ProcessGroupInfo, dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """The sum over peers of tensors that every peer has a part of."""
    if peers.size == 1:
        return tuple(tensors)
    sums = PackedAllReduce([(tensor.shape, tensor.dtype) for tensor in tensors], tensors[0].device, dtype)
    for part, tensor in zip(sums.parts, tensors, strict=True):
        part.copy_(tensor)
    return sums.over(peers)


def all_reduce_in_place(tensor: Tensor, peers: ProcessGroupInfo) -> Tensor:
    """The sum over peers, in the memory of the tensor, which nobody else may use."""
    if peers.size > 1:
        dist.all_reduce(tensor, group=peers.group)
    return tensor


class PackedAllReduce:
    """Tensors of the same rows, summed over peers in one message for each dtype, and filled where they are sent from.

    Args:
        models: shape and dtype of each.
        device: where they are.
        dtype: what they are summed in; None for their own.

    Attributes:
        parts: what this rank adds, as views of the messages. To be filled in.
    """

    def __init__(
        self, models: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._dtypes = [own for _, own in models]
        self._messages: list[Tensor] = []
        parts: dict[int, Tensor] = {}
        for sent_dtype, indices in by_dtype(self._dtypes, dtype).items():
            shapes = [models[index][0] for index in indices]
            if len(indices) == 1:  # the message itself: what a function of autograd returns should be no view
                message = parts[indices[0]] = torch.empty(shapes[0], dtype=sent_dtype, device=device)
            else:  # one after the other, and not side by side: parts are contiguous
                width = sum(prod(shape[1:]) for shape in shapes)
                message = torch.empty(shapes[0][0], width, dtype=sent_dtype, device=device)
                runs = message.view(-1).split([shape.numel() for shape in shapes])
                views = [run.view(shape) for run, shape in zip(runs, shapes, strict=True)]
                parts |= dict(zip(indices, views, strict=True))
            self._messages.append(message)
        self.parts = [parts[index] for index in range(len(models))]

    def over(self, peers: ProcessGroupInfo | None) -> tuple[Tensor, ...]:
        """The sums over peers, each in its own dtype. No peers: this process is alone."""
        if peers is not None and peers.size > 1:
            for message in self._messages:
                dist.all_reduce(message, group=peers.group)
        return tuple(part.to(dtype) for part, dtype in zip(self.parts, self._dtypes, strict=True))


def by_dtype(dtypes: Sequence[torch.dtype], dtype: torch.dtype | None) -> dict[torch.dtype, list[int]]:
    """The places of tensors that are summed in one message, by what they are summed in: `dtype`, or their own."""
    indices: dict[torch.dtype, list[int]] = {}
    for index, own in enumerate(dtypes):
        indices.setdefault(dtype or own, []).append(index)
    return indices


def _reduced(
    tensors: Sequence[Tensor], dtype: torch.dtype | None, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Runs `reduce` once per dtype, on tensors joined along their columns, in `dtype` where one is given."""
    results: list[Tensor | None] = [None] * len(tensors)
    for sent_dtype, indices in by_dtype([tensor.dtype for tensor in tensors], dtype).items():
        columns = [tensors[index].flatten(1) for index in indices]
        joined = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        summed = reduce(joined.to(sent_dtype).contiguous())
        widths = [tensors[index].flatten(1).shape[1] for index in indices]
        for index, column in zip(indices, summed.split(widths, dim=1), strict=True):
            model = tensors[index]
            results[index] = column.to(model.dtype).reshape(len(column), *model.shape[1:])
    return tuple(result for result in results if result is not None)


def all_to_all_rows(
    tensors: Sequence[Tensor],
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    peers: ProcessGroupInfo,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Sends consecutive runs of rows to the peers, in peer order, and returns what they sent.

    `out`: where it goes, if there is a message, of one tensor.
    """
    if peers.size == 1:
        return tuple(tensors)
    single = len(tensors) == 1
    message = tensors[0].contiguous() if single else pack_columns(tensors)
    if out is None:
        out = message.new_empty(sum(output_splits), *message.shape[1:])
    dist.all_to_all_single(out, message, list(output_splits), list(input_splits), group=peers.group)
    return (out,) if single else _unpack(out, tensors)


def block_sizes(tp_peers: ProcessGroupInfo, expert_peers: ProcessGroupInfo, sizes: Sequence[int]) -> Sequence[int]:
    """Of the sizes of all of `tp_peers`'s own rows, those of the neighbours in `expert_peers`."""
    first = tp_peers.ranks.index(expert_peers.ranks[0])
    return sizes[first : first + expert_peers.size]


def block_rows(tp_peers: ProcessGroupInfo, expert_peers: ProcessGroupInfo, sizes: Sequence[int]) -> tuple[int, int]:
    """Where the rows of `expert_peers` start and stop among the rows of `tp_peers`."""
    start = sum(sizes[: tp_peers.ranks.index(expert_peers.ranks[0])])
    return start, start + sum(block_sizes(tp_peers, expert_peers, sizes))
