"""Durable files: safetensors written one tensor at a time, small files replaced atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

# How safetensors spells the dtypes that checkpoints hold.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
# After so many bytes a file's pages are brought to the disk: else all of them would be left to the last fsync, when
# nothing is read any more that could overlap with it.
_SYNC_BYTES = 256 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """How safetensors spells a dtype.

    Raises:
        ValueError: safetensors has no such dtype, or we don't write it.
    """
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"{dtype} tensors have no place in a checkpoint")
    return _DTYPE_NAMES[dtype]


def dtype_of_name(name: str) -> torch.dtype:
    """The dtype that safetensors spells so.

    Raises:
        KeyError: checkpoints don't hold it.
    """
    return _DTYPES[name]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor to be written: its key, dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileMetadata:
    """Size and hash of a finished file."""

    bytes: int
    sha256: str


class TensorFile:
    """A safetensors file whose tensors are handed over one by one, in the order they were announced.

    The format's header only needs sizes, so that no more than one tensor is in memory at a time.

    Args:
        path: where to write.
        entries: all tensors, those of larger dtypes first (readers map the file, and want aligned tensors).

    Attributes:
        metadata: of the finished file; None before.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self.metadata: FileMetadata | None = None
        self._pending = list(reversed(entries))
        self._hash = hashlib.sha256()
        self._bytes = self._synced = 0
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - open until `finish`
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            span = [offset, offset + entry.nbytes]
            header[entry.key] = {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape), "data_offsets": span}
            offset = span[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._write(len(text).to_bytes(8, "little"))
        self._write(text)

    def add(self, key: str, tensor: Tensor) -> None:
        """Writes the next tensor; it has to be the one announced next."""
        entry = self._pending.pop()
        assert (key, tensor.dtype, tuple(tensor.shape)) == (entry.key, entry.dtype, entry.shape), (key, entry)
        if tensor.numel():
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            self._write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def finish(self) -> FileMetadata:
        """Makes the file durable and closes it."""
        assert not self._pending, [entry.key for entry in self._pending]
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.metadata = FileMetadata(self._bytes, self._hash.hexdigest())
        return self.metadata

    def close(self) -> None:
        """Closes the file, whatever is in it."""
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)
        if self._bytes - self._synced >= _SYNC_BYTES:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._synced = self._bytes


def write_temporary(path: Path, data: bytes) -> Path:
    """Writes a small file under a temporary name, durably; `os.replace` it to `path` to put it in place."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def write_durably(path: Path, data: bytes) -> FileMetadata:
    """Puts a small file in place, whole or not at all, even if the machine stops half-way."""
    os.replace(write_temporary(path, data), path)
    sync_folder(path.parent)
    return FileMetadata(len(data), hashlib.sha256(data).hexdigest())


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """The sha256 of a file, read block by block."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
