"""Sharded safetensors files of a model in the hub's format: conversion of names and layouts, weight map, index.

Conversion groups go one by one to a writer thread: a parameter (a layer's fused experts), what the hub's format makes
of it, and what waits to be written (`write_queue.QUEUE_BYTES`, or one larger tensor), is the most that is in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from ds_etp.checkpoint.chunks import Shape
from ds_etp.checkpoint.write_queue import WriteQueue
from ds_etp.checkpoint.writer import TensorEntry, TensorFile, sync_folder, write_durably

WEIGHTS = "model.safetensors"
SHARD_SIZE = "5GB"
# From tensors under the model's own names to those under the hub's names.
ToHub = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class TensorSpec:
    """An unsharded tensor's type and shape, and whether it is a parameter (or a buffer)."""

    dtype: torch.dtype
    shape: Shape
    is_parameter: bool = True


class TensorSource(Protocol):
    """A model's full tensors.

    Attributes:
        specs: all of them by Hugging Face name, in the model's order; a tied one once.
    """

    specs: dict[str, TensorSpec]

    def full(self, name: str) -> Tensor | None:
        """One full tensor on the CPU of the process that writes; None on others, of which all have to call."""


@dataclass(frozen=True)
class ConversionGroup:
    """Tensors that are converted to hub tensors together: one, unless the hub fuses what the model has apart."""

    names: tuple[str, ...]
    hub: dict[str, Tensor]


def conversion_groups(
    specs: Mapping[str, TensorSpec], dtype: torch.dtype | None, to_hub: ToHub
) -> list[ConversionGroup]:
    """In what groups a model's tensors can be handed to `to_hub`, and what comes out (on the meta device).

    Found by trying, without data: which outputs each tensor has alone, and which tensors share an output.
    """

    def converted(names: Sequence[str]) -> dict[str, Tensor]:
        return to_hub({name: _meta(specs[name], dtype) for name in names})

    whole = converted(list(specs))
    sharers: dict[str, list[str]] = {}
    groups: list[ConversionGroup] = []
    try:
        for name in specs:
            for output in converted([name]):
                sharers.setdefault(output, []).append(name)
        joined: dict[str, tuple[str, ...]] = {name: (name,) for name in specs}
        for names in sharers.values():
            members = tuple(dict.fromkeys(member for name in names for member in joined[name]))
            joined.update(dict.fromkeys(members, members))
        groups = [ConversionGroup(names, converted(names)) for names in dict.fromkeys(joined.values())]
    except Exception:
        # A conversion that can't do with a part of the model. It gets all of it below.
        groups = []
    outputs = [(name, tensor.shape) for group in groups for name, tensor in group.hub.items()]
    if sorted(outputs) != sorted((name, tensor.shape) for name, tensor in whole.items()):
        groups = [ConversionGroup(tuple(specs), whole)]
    # Larger types first: readers map the file, and want aligned tensors.
    return sorted(groups, key=lambda group: -max((t.dtype.itemsize for t in group.hub.values()), default=0))


def _meta(spec: TensorSpec, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(spec.shape, dtype=_target(spec, dtype), device="meta")


def _target(spec: TensorSpec, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and spec.is_parameter and spec.dtype.is_floating_point else spec.dtype


class HubFolder:
    """The weight files of a model, in writing.

    Args:
        folder: where to; made if it isn't there.
        weights_name: of the file; files of a larger model get numbers in it.
        specs: the model's tensors.
        to_hub: from the model's names to the hub's.
        dtype: what parameters are cast to; None keeps their types.
        max_shard_size: of one file, as in `save_pretrained`.

    Attributes:
        conversion_groups: the names that `add` wants together, in the order it wants them.
    """

    def __init__(
        self,
        folder: Path,
        weights_name: str,
        specs: Mapping[str, TensorSpec],
        to_hub: ToHub,
        dtype: torch.dtype | None,
        max_shard_size: int | str,
    ) -> None:
        self._folder, self._stem = folder, weights_name.removesuffix(".safetensors")
        self._specs, self._to_hub, self._dtype = specs, to_hub, dtype
        groups = conversion_groups(specs, dtype, to_hub)
        self.conversion_groups = [group.names for group in groups]
        everything = {name: tensor for group in groups for name, tensor in group.hub.items()}
        split = split_torch_state_dict_into_shards(
            everything, filename_pattern=f"{self._stem}{{suffix}}.safetensors", max_shard_size=max_shard_size
        )
        self._file_of = dict(split.tensor_to_filename)
        self._entries = {
            file: [TensorEntry(name, everything[name].dtype, tuple(everything[name].shape)) for name in names]
            for file, names in split.filename_to_tensors.items()
        }
        self._index = {"metadata": split.metadata, "weight_map": self._file_of} if split.is_sharded else None
        self._open: tuple[str, TensorFile] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._queue = WriteQueue()
        self._queue.start()

    def add(self, group: Mapping[str, Tensor]) -> None:
        """Hands the next of `conversion_groups`, full tensors on the CPU, to the writer thread.

        Raises:
            Exception: one of those before could not be written.
        """
        if self._queue.failure is not None:
            raise self._queue.failure
        cast = {name: tensor.to(_target(self._specs[name], self._dtype)) for name, tensor in group.items()}
        for name, tensor in self._to_hub(cast).items():
            self._queue.put(tensor.nbytes, partial(self._write, name, tensor))

    def _write(self, name: str, tensor: Tensor) -> None:
        """On the writer thread."""
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._finish_file()
            self._open = (file, TensorFile(self._folder / f"{file}.tmp", self._entries[file]))
        self._open[1].add(name, tensor)

    def finish(self) -> None:
        """Puts the index in place and takes away what an earlier export left: it would be loaded instead.

        Raises:
            Exception: a file could not be written.
        """
        self._queue.finish()
        self._finish_file()
        index = f"{self._stem}.safetensors.index.json"
        keep = set(self._entries)
        if self._index is not None:
            write_durably(self._folder / index, json.dumps(self._index, indent=2, sort_keys=True).encode())
            keep.add(index)
        ours = re.compile(rf"{re.escape(self._stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json|\.tmp)?")
        for path in self._folder.iterdir():
            if path.name not in keep and ours.fullmatch(path.name):
                path.unlink()
        sync_folder(self._folder)

    def discard(self) -> None:
        """Ends the writer thread, and takes away the file that is in writing."""
        self._queue.stop()
        if self._open is not None:
            self._open[1].close()
            (self._folder / f"{self._open[0]}.tmp").unlink(missing_ok=True)

    def _finish_file(self) -> None:
        if self._open is not None:
            file, writer = self._open
            writer.finish()
            (self._folder / f"{file}.tmp").replace(self._folder / file)
            self._open = None
