"""Counts what would make the host wait for a GPU, on a machine without one.

Everything runs on the CPU, where values are there at once. So that copies show all the same, tensors are told apart by
where they would be: those that a case names are on the device, and so is what is made of them, or with `device=`. The
others are the host's. Recorded:

    values        `.item()`, `bool(tensor)`, `torch.equal`: a number is read from the device
    shapes        `nonzero`, masks as an index, `unique`, `bincount`, `repeat_interleave` without `output_size`
    copies        `.cpu()`, `.numpy()`, `.tolist()` of a device tensor
    pageable      a list, or a tensor of the host's, put on the device by anything but `to(non_blocking=True)`

A host tensor that meets one on the device without such a copy is an error, as on CUDA.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_VALUES = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose")
_SHAPES = (
    *("aten::nonzero", "aten::masked_select", "aten::bincount", "aten::_unique2", "aten::unique_dim"),
    *("aten::unique_consecutive", "aten::histogram"),
)
_COPIES = ("cpu", "numpy", "tolist", "item", "__array__", "__int__", "__float__", "__bool__", "__index__")
_FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray)
_HERE = (__file__, torch.__file__.rpartition("/")[0], traceback.__file__)


@dataclass(frozen=True)
class Sync:
    """One wait.

    Attributes:
        kind: of those above.
        name: the operator.
        file, line: of the code that called it, torch's own left out.
    """

    kind: str
    name: str
    file: str
    line: int

    @property
    def is_ours(self) -> bool:
        """Whether ds_etp asks, and not a family's own forward."""
        return "/ds_etp/" in self.file


class HostSyncs(TorchFunctionMode):
    """Records the waits of what runs inside, on this thread.

    Args:
        device: tensors, and modules, that are on the device.
    """

    def __init__(self, *device: Tensor | torch.nn.Module) -> None:
        super().__init__()
        self.found: list[Sync] = []
        self.makes_device_tensors = False
        self._operators = _Operators(self)
        # By identity of storage. All are kept, so that none of them is another's later.
        self._storages: dict[int, Any] = {}
        for entry in device:
            self.mark([entry] if isinstance(entry, Tensor) else [*entry.parameters(), *entry.buffers()])

    def __enter__(self) -> HostSyncs:
        super().__enter__()
        self._operators.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._operators.__exit__(*error)
        super().__exit__(*error)

    def mark(self, tensors: Iterable[Any]) -> None:
        """Notes tensors as the device's."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage

    def is_on_device(self, tensor: Any) -> bool:
        """Whether a tensor would be on the device."""
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._storages

    def record(self, kind: str, name: str) -> None:
        """Notes a wait."""
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_HERE)]
        where = frames[-1] if frames else traceback.extract_stack()[-1]
        self.found.append(Sync(kind, name, where.filename, where.lineno or 0))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        subject = args[0] if args else None
        if func is Tensor.backward:
            super().__enter__()  # a mode is off while it answers: it is to see what backward runs
            try:
                grads = (kwargs["gradient"] if "gradient" in kwargs else args[1],)
                return _engine_run_backward(
                    (subject,), grads, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            finally:
                super().__exit__(None, None, None)
        if name in _COPIES and self.is_on_device(subject):
            self.record("copies", name)
            with self._operators.paused():
                out = func(*args, **kwargs)
                # What is read is the host's from now on.
                return out.clone() if isinstance(out, Tensor) else out
        if func in _FROM_LISTS and kwargs.get("device") is not None and isinstance(subject, list | tuple) and subject:
            self.record("pageable", name)
        before = self.makes_device_tensors
        # What torch's own functions make on their way is where their arguments are.
        self.makes_device_tensors = any(self.is_on_device(leaf) for leaf in tree_leaves((args, kwargs)))
        try:
            out = func(*args, **kwargs)
        finally:
            self.makes_device_tensors = before
        if name == "to" and not self.is_on_device(subject):
            if not kwargs.get("non_blocking"):
                return out
            out = out.clone()
            self.mark([out])
        elif kwargs.get("device") is not None:
            self.mark(tree_leaves(out))
        return out


class _Operators(TorchDispatchMode):
    """The operators that run, those of autograd's backward too."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs, self._is_paused = syncs, False

    def paused(self) -> Any:
        """A context in which nothing is looked at."""
        operators = self

        class Paused:
            def __enter__(self) -> None:
                operators._is_paused = True

            def __exit__(self, *error: Any) -> None:
                operators._is_paused = False

        return Paused()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        syncs, name = self._syncs, func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if syncs.is_on_device(tensor)]
        if on_device:
            for kind, operator in _waits(name, args, kwargs):
                syncs.record(kind, operator)
            # A host tensor of no dimensions is passed as a number. Empty ones have no values.
            others = [
                tensor for tensor in tensors if not syncs.is_on_device(tensor) and tensor.dim() and tensor.numel()
            ]
            # What gloo works with inside of a collective is its own.
            in_collective = others and any(
                "/torch/distributed/" in frame.filename for frame in traceback.extract_stack()
            )
            assert not others or in_collective, (
                f"{name} of tensors of the host's {[tuple(o.shape) for o in others]} and the device's"
            )
        out = func(*args, **kwargs)
        if on_device or (syncs.makes_device_tensors and not tensors):
            syncs.mark(tree_leaves(out))
        return out


def _waits(name: str, args: Any, kwargs: Any) -> Iterator[tuple[str, str]]:
    if name in _VALUES:
        yield "values", name
    if name in _SHAPES or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
        yield "shapes", name
    if name.startswith(("aten::index", "aten::_index_put")) and len(args) > 1 and isinstance(args[1], list | tuple):
        masks = [part for part in args[1] if part is not None and part.dtype in (torch.bool, torch.uint8)]
        if masks:
            yield "shapes", f"{name} with a mask"


def count(work: Callable[[], Any], *device: Tensor | torch.nn.Module) -> tuple[Any, list[Sync]]:
    """What `work` returns, and its waits."""
    with HostSyncs(*device) as syncs:
        result = work()
    return result, syncs.found
