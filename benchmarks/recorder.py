"""What this process sends: every collective with its group, rows and bytes, whoever calls it.

The same rules for everybody, so that libraries can be compared. A rank sends, of n ranks:

    all-reduce                    2(n-1)/n of the tensor, as a ring does
    all-gather, reduce-scatter    (n-1)/n of the full tensor
    all-to-all                    what goes to others
    broadcast, scatter, gather    (n-1)/n of the tensor
    send                          the tensor

Calls are seen below Python's torch.distributed, as operators of torch, so functional collectives, DTensor
and DeepSpeed's wrappers are all in. DeepSpeed's own shared-memory all-reduce on CPU (its ZeRO reductions)
is none of torch's and stays out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Message:
    """One collective as one rank sees it.

    Attributes:
        name: which; one name for all ways to call it.
        group: the process group's name; groups of the same ranks differ by it.
        ranks: the group's global ranks.
        rows: how many rows of `[rows, ...]` this rank sends; 0 for flat tensors, such as sizes.
        bytes: how many bytes it sends.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    rows: float
    bytes: float


@dataclass
class Recording:
    """What was sent while it was on."""

    messages: list[Message] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        """Bytes of all messages."""
        return sum(message.bytes for message in self.messages)

    @property
    def names(self) -> list[str]:
        """The names of all messages, in order."""
        return [message.name for message in self.messages]


@contextmanager
def record() -> Iterator[Recording]:
    """Records this thread's collectives, backward ones on CPU included."""
    recording = Recording()
    with _Recorder(recording):
        yield recording


_NAMES = {  # operator -> name, and the share of the input that is sent, in (n-1) or (n-1)/n parts
    "c10d::allreduce_": ("all_reduce", "2(n-1)/n"),
    "c10d::allreduce_coalesced_": ("all_reduce", "2(n-1)/n"),
    "c10d::_allgather_base_": ("all_gather", "n-1"),
    "c10d::allgather_": ("all_gather", "n-1"),
    "c10d::allgather_coalesced_": ("all_gather", "n-1"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "n-1"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "(n-1)/n"),
    "c10d::reduce_scatter_": ("reduce_scatter", "(n-1)/n"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "(n-1)/n"),
    "c10d::alltoall_base_": ("all_to_all", "others"),
    "c10d::alltoall_": ("all_to_all", "others"),
    "c10d::broadcast_": ("broadcast", "(n-1)/n"),
    "c10d::scatter_": ("scatter", "(n-1)/n"),
    "c10d::gather_": ("gather", "(n-1)/n"),
    "c10d::reduce_": ("reduce", "(n-1)/n"),
    "c10d::send": ("send", "1"),
    "_c10d_functional::all_reduce": ("all_reduce", "2(n-1)/n"),
    "_c10d_functional::all_reduce_": ("all_reduce", "2(n-1)/n"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "n-1"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "(n-1)/n"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "others"),
    "_c10d_functional::broadcast": ("broadcast", "(n-1)/n"),
}


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording, self._depth = recording, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _NAMES and not self._depth:
            self._recording.messages.append(_message(name, func._schema, args, kwargs or {}))
        self._depth += 1  # an operator may be made of others
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._depth -= 1


def _message(operator: str, schema: Any, args: Any, kwargs: Any) -> Message:
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    name, share = _NAMES[operator]
    functional = operator.startswith("_c10d_functional")
    group = _group(values)
    ranks = tuple(dist.get_process_group_ranks(group))
    n, place = len(ranks), ranks.index(dist.get_rank())
    tensors = _inputs(values, functional)
    if share == "others":
        splits = values.get("input_split_sizes")
        if operator == "c10d::alltoall_":
            tensors, splits = [tensor for index, tensor in enumerate(tensors) if index != place], None
            fraction = 1.0
        else:
            rows = len(tensors[0])
            fraction = 1 - (splits[place] / rows if splits and rows else 1 / n)
    else:
        fraction = {"2(n-1)/n": 2 * (n - 1) / n, "n-1": n - 1, "(n-1)/n": (n - 1) / n, "1": 1}[share]
    return Message(
        name,
        group.group_name,
        ranks,
        rows=fraction * sum(len(tensor) for tensor in tensors if tensor.dim() > 1),
        bytes=fraction * sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )


def _group(values: dict[str, Any]) -> Any:
    if "group_name" in values:
        return torch._C._distributed_c10d._resolve_process_group(values["group_name"])
    group = values["process_group"]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _inputs(values: dict[str, Any], functional: bool) -> list[Tensor]:
    """The tensors a rank brings, whatever the operator calls them."""
    for name in ("input_tensor", "input_tensors", "inputs", "input", "tensors", "tensor"):
        if name in values:
            value = values[name]
            break
    else:
        raise RuntimeError(f"no input among {sorted(values)}")
    return [value] if isinstance(value, Tensor) else [t for item in value for t in _flat(item)]


def _flat(item: Any) -> list[Tensor]:
    return [item] if isinstance(item, Tensor) else list(item)
