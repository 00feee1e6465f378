"""A checkpoint of plain DeepSpeed, written anew in ds_etp's format: the way of a running job into any layout.

One process, on the CPU: weights and optimizer states are put together one tensor at a time, out of mapped files.

    import_checkpoint(Path("runs/plain"), Path("runs/imported"))        # or: ds-etp import runs/plain runs/imported
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_etp.checkpoint.chunks import Shape, whole_chunk
from ds_etp.checkpoint.commit import Commit
from ds_etp.checkpoint.deepspeed_files import DeepSpeedFiles, open_deepspeed
from ds_etp.checkpoint.deepspeed_zero import zero_parameters
from ds_etp.checkpoint.folder import FileNames, next_generation, remove
from ds_etp.checkpoint.format import BUFFER, LATEST, WEIGHT, own_version
from ds_etp.checkpoint.metadata import ParamMetadata, StageMetadata, make_index
from ds_etp.checkpoint.save import serialized_state
from ds_etp.checkpoint.save_plan import TensorMetadata
from ds_etp.checkpoint.writer import TensorEntry, TensorFile
from ds_etp.errors import CheckpointError
from ds_etp.log import logger

# What DeepSpeed saves beside the client state, in one dict with it.
_OWN_ENTRIES = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info"),
}
_HELPERS = ("lr_scheduler", "random_ltd", "data_sampler")


@dataclass(frozen=True)
class _SourceTensor:
    """A tensor to be written and how it is read."""

    metadata: TensorMetadata
    read: Callable[[], Tensor]


def import_checkpoint(source: Path, directory: Path, *, tag: str | None = None, trust_pickle: bool = False) -> Path:
    """Writes a checkpoint of plain DeepSpeed (ZeRO 1 to 3, data parallelism alone) as one of ds_etp.

    Master weights, optimizer states, hyperparameters, step counts, the lr scheduler, the loss scale, counters and the
    client state are all taken over. `directory` may be `source`: DeepSpeed's files stay beside the new ones.

    Args:
        source: the directory that holds the tags, or a tag's folder.
        directory: where the tag is written, with the name it has in the source, and `latest`.
        tag: which tag of `source`; the one that its `latest` names where None.
        trust_pickle: lets the source's files run code, where they hold objects of other classes than DeepSpeed's own.

    Returns:
        The folder of the new tag.

    Raises:
        CheckpointError: it can't be imported, for the reason given. `directory` holds no new checkpoint then.
    """
    folder = _tag_folder(source, tag)
    files = open_deepspeed(folder, trust_pickle=trust_pickle)
    if directory.resolve() == folder.resolve():
        directory = directory.parent  # the tag's folder itself: in place
    tensors, parameters = _collect(files)
    # Larger dtypes come first: readers map the files and want aligned tensors.
    tensors.sort(key=lambda tensor: -tensor.metadata.dtype.itemsize)
    state = serialized_state(_state(files))
    target = directory / folder.name
    target.mkdir(parents=True, exist_ok=True)
    names = FileNames(target, next_generation(target))
    written = [(tensor.metadata.key, 0, whole_chunk(tensor.metadata.shape).logical) for tensor in tensors]
    index = make_index([tensor.metadata for tensor in tensors], [written], parameters, _optimizer_class(files), names)
    index.engine, index.layout = _engine(files), _layout(files)
    index.extra = {"tag": folder.name, **_about(files), **index.extra}
    commit = Commit(names, folder.name, index, state)
    try:
        commit.stage({0: _write(names.data(0), tensors).metadata})
    except BaseException:
        remove(names.data(0))
        commit.discard()
        raise
    commit.place()
    return target


def _tag_folder(source: Path, tag: str | None) -> Path:
    if tag is not None:
        return source / tag
    latest = source / LATEST
    if latest.is_file():
        return source / latest.read_text().strip()
    if source.is_dir() and not any(source.glob("*_states.pt")):
        raise CheckpointError(f"{source} has no file {LATEST} and no checkpoint files: name a tag")
    return source.resolve()


def _write(path: Path, tensors: list[_SourceTensor]) -> TensorFile:
    entries = [TensorEntry(f"{t.metadata.key}#0", t.metadata.dtype, t.metadata.shape) for t in tensors]
    file = TensorFile(path, entries)
    try:
        for tensor, entry in zip(tensors, entries, strict=True):
            file.add(entry.key, tensor.read())
        file.finish()
    finally:
        file.close()
    return file


def _collect(files: DeepSpeedFiles) -> tuple[list[_SourceTensor], StageMetadata]:
    """Everything to be written, and the parameters in the model's order.

    Raises:
        CheckpointError: a parameter's values are not in the files.
    """
    model = files.models[0]
    module: Mapping[str, Any] = model["module"]
    trained = {parameter.name: parameter for parameter in zero_parameters(files)}
    frozen: dict[str, tuple[Shape, Callable[[], Tensor]]] = dict(_frozen(files))
    shared, buffers = model.get("shared_params") or {}, set(model.get("buffer_names") or ())
    tensors: list[_SourceTensor] = []
    parameters: StageMetadata = {}
    for name in dict.fromkeys((*module, *trained, *frozen)):
        if name in trained:
            parameter = trained[name]
            first = parameter.partition
            parameters[name] = ParamMetadata(parameter.shape, False, (first.hyperparameters, first.scalars))
            for state_name in (WEIGHT, *sorted(set(first.tensors) - {WEIGHT})):
                dtype = first.tensors[state_name].dtype
                metadata = TensorMetadata(f"{state_name}/{name}", parameter.shape, dtype)
                tensors.append(_SourceTensor(metadata, lambda p=parameter, s=state_name: p.read(s)))  # type: ignore[misc]
        elif name in buffers:
            value = module[name]
            metadata = TensorMetadata(f"{BUFFER}/{name}", tuple(value.shape), value.dtype)
            tensors.append(_SourceTensor(metadata, lambda v=value: v))  # type: ignore[misc]
        elif name in frozen:
            shape, read = frozen[name]
            dtype = _frozen_dtype(files, name)
            parameters[name] = ParamMetadata(shape, True, None)
            tensors.append(_SourceTensor(TensorMetadata(f"{WEIGHT}/{name}", shape, dtype), read))
        elif name not in shared and isinstance(module[name], Tensor):
            raise CheckpointError(f"{files.folder} doesn't hold the values of {name}, which no optimizer steps")
    return tensors, parameters


def _frozen(files: DeepSpeedFiles) -> Iterator[tuple[str, tuple[Shape, Callable[[], Tensor]]]]:
    """Parameters that no optimizer steps: whole in the module's state, at ZeRO 3 in equal parts over ranks."""
    model = files.models[0]
    if files.stage < 3:
        skipped = {*(model.get("shared_params") or ()), *(model.get("buffer_names") or ())}
        trained = {name for group in model["param_shapes"] for name in group}
        for name, value in model["module"].items():
            if isinstance(value, Tensor) and name not in skipped and name not in trained:
                yield name, (tuple(value.shape), lambda v=value: v)  # type: ignore[misc]
        return
    for name, given in (model.get("frozen_param_shapes") or {}).items():
        shape: Shape = tuple(given)
        parts = [rank_model["frozen_param_fragments"][name].reshape(-1) for rank_model in files.models]
        if sum(part.numel() for part in parts) < prod(shape):
            raise CheckpointError(f"{files.folder} doesn't hold all of {name}: its parts over ranks are too small")
        yield name, (shape, lambda p=parts, s=shape: torch.cat(p)[: prod(s)].view(s))  # type: ignore[misc]


def _frozen_dtype(files: DeepSpeedFiles, name: str) -> torch.dtype:
    model = files.models[0]
    value: Tensor = model["module"][name] if files.stage < 3 else model["frozen_param_fragments"][name]
    return value.dtype


def _state(files: DeepSpeedFiles) -> dict[str, Any]:
    model = files.models[0]
    helpers = {name: model[name] for name in _HELPERS if model.get(name) is not None}
    client_state = {key: value for key, value in model.items() if key not in _OWN_ENTRIES}
    objects = [key for key, value in client_state.items() if not _is_plain(value)]
    if objects:  # only where the files were trusted
        logger().warning("%s: objects in the client state are left out: %s", files.folder, ", ".join(objects))
    return {"client_state": {key: value for key, value in client_state.items() if key not in objects}, **helpers}


def _is_plain(value: Any) -> bool:
    try:
        serialized_state({"value": value})
    except CheckpointError:
        return False
    return True


def _engine(files: DeepSpeedFiles) -> dict[str, Any]:
    model, scaler = files.models[0], files.optimizers[0].get("loss_scaler")
    steps, factor = int(model["global_steps"]), files.config.get("gradient_accumulation_steps")
    return {
        "global_steps": steps,
        "global_samples": int(model.get("global_samples", 0)),
        "micro_steps": steps * (factor if isinstance(factor, int) else 1),
        "skipped_steps": int(model.get("skipped_steps", 0)),
        "loss_scale": {
            key: v for key, v in getattr(scaler, "__dict__", {}).items() if isinstance(v, bool | int | float)
        },
    }


def _layout(files: DeepSpeedFiles) -> dict[str, Any]:
    half = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}
    config = files.config
    found = [dtype for dtype, keys in half.items() if any((config.get(key) or {}).get("enabled") for key in keys)]
    sizes = {"world": files.world, "tp": 1, "pp": 1, "etp": 1, "ep": 1}
    return {**sizes, "ZeRO stage": files.stage, "dtype": found[0] if found else "fp32"}


def _about(files: DeepSpeedFiles) -> dict[str, Any]:
    model = files.models[0]
    return {
        "ds_etp": own_version(),
        "deepspeed": model.get("ds_version"),
        "tied": dict(model.get("shared_params") or {}),
    }


def _optimizer_class(files: DeepSpeedFiles) -> str:
    """The files don't say, but for the config's name; it serves messages only."""
    return str((files.config.get("optimizer") or {}).get("type", "the imported run's"))
