"""The checkpoint format: one JSON index, one safetensors file of chunks for each rank, one small file of other state.

    <dir>/latest                            the tag to resume from
    <dir>/<tag>/index.json                  written last: a tag without it is incomplete
    <dir>/<tag>/rankNNNNN[.G].safetensors   keys `<state name>/<name>#<chunk number>`
    <dir>/<tag>/state[.G].pt                lr scheduler and client state, `torch.load(weights_only=True)`

A state name is `fp32` (the master weight; where there is none, as for frozen parameters, the weight in its own
type), that of an optimizer state (`exp_avg`, ...), or `buffer`. Names and shapes are Hugging Face's. G
counts how often the tag was written: files of a new save never replace those the old index names.

    with StoredCheckpoint.open(Path(folder)) as stored:        # no process group needed
        tensor = stored.read("fp32/model.norm.weight")
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_etp.checkpoint.chunks import Chunk, Shape, coverage_error, read_plan
from ds_etp.checkpoint.writer import FileMetadata, dtype_name, dtype_of_name, hash_file
from ds_etp.errors import CheckpointError

FORMAT = 1
INDEX = "index.json"
LATEST = "latest"
WEIGHT = "fp32"
BUFFER = "buffer"


@dataclass(frozen=True)
class StoredChunk:
    """A chunk and the file it is in."""

    chunk: Chunk
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor and where its chunks are; they tile it exactly."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[StoredChunk, ...]


@dataclass
class Index:
    """What index.json says.

    Attributes:
        tensors: by `<state name>/<name>`.
        files: every file of the checkpoint, index.json apart.
        parameters: unsharded shape of every parameter of the model, stored or not, in the model's order.
        optimizer: None, or `class`; `groups`, hyperparameters; `group_of`, by parameter name, the place in
            `groups`; `scalars`, by parameter name, such as `{"step": 5}`.
        engine: counters and the loss scaler's state.
        layout: sizes and ZeRO stage of the run that wrote it.
        extra: further entries: `ds_etp`, `tag`, `frozen`, `excluded`, `tied`, `model_class`, `state_file`,
            `hf_config`, `hf_generation_config`.
    """

    tensors: dict[str, StoredTensor]
    files: dict[str, FileMetadata]
    parameters: dict[str, Shape]
    optimizer: dict[str, Any] | None
    engine: dict[str, Any]
    layout: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)

    def state_names_of(self, name: str) -> set[str]:
        """The states that are stored of a parameter, `fp32` among them."""
        return {state_name for state_name in self.state_names if f"{state_name}/{name}" in self.tensors}

    @property
    def state_names(self) -> list[str]:
        """All states that are stored of any parameter."""
        return sorted({key.partition("/")[0] for key in self.tensors} - {BUFFER})

    @property
    def buffers(self) -> list[str]:
        """Names of the stored buffers."""
        return [key.partition("/")[2] for key in self.tensors if key.startswith(f"{BUFFER}/")]

    def coverage_error(self) -> str | None:
        """What keeps the chunks from being exactly the tensors, in words; None where nothing does."""
        for key, tensor in self.tensors.items():
            problem = coverage_error(tensor.shape, [stored.chunk for stored in tensor.chunks])
            if problem:
                return f"{key}: {problem}"
        return None

    def dump(self) -> bytes:
        """The index as it is written."""
        tensors = {
            key: {
                "dtype": dtype_name(tensor.dtype),
                "shape": tensor.shape,
                "boxes": [
                    {"start": s.chunk.start, "size": s.chunk.size, "file": s.file, "key": s.key} for s in tensor.chunks
                ],
            }
            for key, tensor in self.tensors.items()
        }
        content = {
            "format": FORMAT,
            "layout": self.layout,
            "engine": self.engine,
            **self.extra,
            "fingerprint": fingerprint(self.parameters),
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "files": {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in self.files.items()},
            "tensors": tensors,
        }
        return json.dumps(content, indent=1, allow_nan=True).encode()

    @classmethod
    def parse(cls, path: Path) -> Index:
        """Reads an index.

        Raises:
            CheckpointError: the file is damaged, incomplete or of a newer format; the message names it.
        """
        try:
            content = json.loads(path.read_bytes())
            version = content["format"]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: it is not an index of ds_etp ({error})") from error
        if version > FORMAT:
            raise CheckpointError(
                f"{path} has format {version}, written by ds_etp {content.get('ds_etp')}; this ds_etp reads up to "
                f"format {FORMAT}. Install the newer ds_etp to load it."
            )
        try:
            index = cls._from_content(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from error
        if content["fingerprint"] != fingerprint(index.parameters):
            raise CheckpointError(f"{path} is damaged: its fingerprint is not that of its parameters")
        gap = index.coverage_error()
        if gap:
            raise CheckpointError(f"{path} is damaged: {gap}")
        return index

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> Index:
        tensors = {}
        for key, value in content["tensors"].items():
            chunks = tuple(
                StoredChunk(Chunk(tuple(b["start"]), tuple(b["size"])), b["file"], b["key"]) for b in value["boxes"]
            )
            tensors[key] = StoredTensor(dtype_of_name(value["dtype"]), tuple(value["shape"]), chunks)
        files = {name: FileMetadata(entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
        parameters = {name: tuple(shape) for name, shape in content["parameters"].items()}
        known = {"format", "tensors", "files", "parameters", "fingerprint", "optimizer", "engine", "layout"}
        extra = {key: value for key, value in content.items() if key not in known}
        return cls(tensors, files, parameters, content["optimizer"], content["engine"], content["layout"], extra)


def fingerprint(parameters: dict[str, Shape]) -> str:
    """Tells one model from another: a digest of names and unsharded shapes."""
    text = "\n".join(f"{name} {list(shape)}" for name, shape in sorted(parameters.items()))
    return sha256(text.encode()).hexdigest()


class StoredCheckpoint:
    """A complete checkpoint, open for reading.

    Attributes:
        folder: the tag's folder.
        index: what is in it.
    """

    # Maps of files, not reads of them; a bound keeps a large world's checkpoint below the open-file limit.
    _OPEN_FILES = 64

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._handles: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: Path) -> StoredCheckpoint:
        """Opens a tag's folder. Sizes of files are checked, hashes are not (see `check_file`).

        Raises:
            CheckpointError: it names the file that is missing or damaged.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder, so there is no checkpoint in it")
        if not (folder / INDEX).exists():
            raise CheckpointError(missing_index(folder))
        stored = cls(folder, Index.parse(folder / INDEX))
        for name in stored.index.files:
            stored.check_file(name, contents=False)
        return stored

    def check_file(self, name: str, *, contents: bool = True) -> None:
        """Compares one of the checkpoint's files with what the index says of it: its size and its hash.

        Raises:
            CheckpointError: it names the file and what is wrong.
        """
        path, metadata = self.folder / name, self.index.files[name]
        try:
            size = path.stat().st_size
            if size != metadata.bytes:
                raise CheckpointError(f"{path} is damaged: {size} bytes, {metadata.bytes} were written")
            if contents and hash_file(path) != metadata.sha256:
                raise CheckpointError(f"{path} is damaged: its sha256 is not the one that was written")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing, and {self.folder / INDEX} needs it") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def read(self, key: str, chunk: Chunk | None = None) -> Tensor:
        """A tensor `<state name>/<name>`, or one chunk of it, in the type it is stored in, on the CPU."""
        tensor = self.index.tensors[key]
        chunk = chunk or Chunk((0,) * len(tensor.shape), tensor.shape)
        result = torch.empty(chunk.size, dtype=tensor.dtype)
        for item in read_plan([stored.chunk for stored in tensor.chunks], [chunk]):
            stored = tensor.chunks[item.stored_index]
            result[item.wanted_chunk.slices()] = self._read_chunk(stored, item.stored_chunk)
        return result

    def _read_chunk(self, stored: StoredChunk, chunk: Chunk) -> Tensor:
        path = self.folder / stored.file
        try:
            if stored.file not in self._handles:
                if len(self._handles) >= self._OPEN_FILES:
                    self._handles.pop(next(iter(self._handles)))
                self._handles[stored.file] = safe_open(path, framework="pt")
            handle = self._handles[stored.file]
            if not chunk.size:
                scalar: Tensor = handle.get_tensor(stored.key)
                return scalar
            values: Tensor = handle.get_slice(stored.key)[chunk.slices()]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged: {stored.key} cannot be read ({error})") from error
        return values

    def close(self) -> None:
        """Lets go of the files."""
        self._handles.clear()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def missing_index(folder: Path) -> str:
    """What a folder without an index is, in words."""
    names = [entry.name for entry in folder.iterdir()]
    if any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        return (
            f"{folder} was written by DeepSpeed without ds_etp: it has no {INDEX}. If its run had data parallelism "
            "alone, at ZeRO 1 to 3, this makes a checkpoint of it that loads in any layout, moments included: "
            f"ds-etp import {folder} {folder.parent}. Else load it once without the expert_tensor_parallel block, on "
            "the layout that wrote it, and save it there with ds_etp.save_checkpoint(engine, dir)."
        )
    if any(name.startswith("rank") for name in names):
        return f"{folder} is incomplete: its save did not finish, {INDEX} is missing. Load another tag."
    return f"{folder} holds no checkpoint: {INDEX} is missing"


def own_version() -> str:
    """The release of this package, for the index."""
    try:
        return version("ds-etp")
    except PackageNotFoundError:
        return "unknown"
