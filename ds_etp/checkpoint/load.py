"""Loading a checkpoint: each rank reads its chunks from the stored ones that overlap them, whatever layout wrote these.

In two phases. Names, shapes, states and files are checked first, on all ranks, and what is wrong is raised on all of
them with nothing changed in memory. Then weights and optimizer states are filled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.checkpoint.chunks import LogicalTensor, logical_tensors, persistent_buffers
from ds_etp.checkpoint.format import BUFFER, WEIGHT, Index, StoredCheckpoint
from ds_etp.checkpoint.pipeline_stages import all_gather_stages, union_over_stages
from ds_etp.checkpoint.states import EngineStates, OptimizerTensor, apply_hyperparameters
from ds_etp.errors import CheckpointError
from ds_etp.log import log_table, logger
from ds_etp.parallel.consensus import (
    assert_same_on_all_ranks,
    raise_if_any_failed,
    raise_on_all_ranks,
)
from ds_etp.parallel.topology import Topology

SKIP_HASHES = "DS_ETP_SKIP_HASHES"


@dataclass(frozen=True)
class LoadRequest:
    """What to load.

    Attributes:
        folder: the tag's folder.
        strict: the checkpoint has to have every parameter of the model and no other.
        optimizer: moments, steps and hyperparameters too.
        layout: sizes and ZeRO stage of this run, for the log.
    """

    folder: Path
    strict: bool
    optimizer: bool
    layout: dict[str, Any]


def load(
    model: nn.Module, states: EngineStates, topology: Topology, request: LoadRequest
) -> tuple[Index, dict[str, Any]]:
    """Fills an engine's tensors from a checkpoint. Collective over the world.

    Returns:
        The checkpoint's index, and the state (lr scheduler, client state) saved with it.

    Raises:
        CheckpointError: on every rank alike; it names the file. Unless it says so, nothing was changed.
    """
    what, rank = f"loading checkpoint {request.folder}", dist.get_rank()
    tensors: list[LogicalTensor] = []
    stored: StoredCheckpoint
    state: dict[str, Any] = {}
    assert_same_on_all_ranks("loading a checkpoint", (str(request.folder), request.strict, request.optimizer))
    buffers: dict[str, Tensor] = {}
    with raise_on_all_ranks(what):
        tensors, buffers = logical_tensors(model, topology, rank), dict(persistent_buffers(model))
    by_stage = all_gather_stages((dict.fromkeys(tensor.name for tensor in tensors), dict.fromkeys(buffers)), topology)
    parameter_names = union_over_stages(parameters for parameters, _ in by_stage).keys()
    buffer_names = union_over_stages(stage_buffers for _, stage_buffers in by_stage).keys()
    with raise_on_all_ranks(what):
        stored = StoredCheckpoint.open(request.folder)
        _check_shapes(stored.index, tensors, buffers, request)
        _check_names(stored.index, parameter_names, buffer_names, request)
        if request.optimizer:
            _check_optimizer(stored.index, states, request.folder)
        if not os.environ.get(SKIP_HASHES):
            # Each file once, by one of the ranks.
            for name in list(stored.index.files)[rank :: dist.get_world_size()]:
                stored.check_file(name)
        state = torch.load(request.folder / stored.index.extra["state_file"], map_location="cpu", weights_only=True)
    with stored:
        optimizer_tensors = _prepare_optimizer_tensors(what, stored.index, tensors, states) if request.optimizer else {}
        states.before_load()
        with raise_on_all_ranks(f"{what} (the engine now holds a part of it: load a complete one before you train on)"):
            _fill(model, stored, tensors, states, request.optimizer)
            if request.optimizer:
                _restore_optimizer_tensors(stored.index, optimizer_tensors)
        states.after_load()
    if rank == 0:
        _log(stored.index, request, tensors)
    return stored.index, state


def _check_shapes(index: Index, tensors: list[LogicalTensor], buffers: dict[str, Tensor], request: LoadRequest) -> None:
    where = f"{request.folder} was written by another model"
    for tensor in tensors:
        name, shape = tensor.name, tensor.shape
        if name in index.parameters and index.parameters[name] != shape:
            raise CheckpointError(f"{where}: {name} is {index.parameters[name]} there and {shape} here")
    for name, buffer in buffers.items():
        stored = index.tensors.get(f"{BUFFER}/{name}")
        if stored is not None and stored.shape != tuple(buffer.shape):
            raise CheckpointError(f"{where}: buffer {name} is {stored.shape} there and {tuple(buffer.shape)} here")


def _check_names(index: Index, parameters: Set[str], buffers: Set[str], request: LoadRequest) -> None:
    where = f"{request.folder} was written by another model"
    if not parameters & index.parameters.keys():
        raise CheckpointError(f"{where}: it has none of this model's parameters")
    if not request.strict:
        return
    there, here = {*index.parameters, *index.buffers}, {*parameters, *buffers}
    if there != here:
        raise CheckpointError(
            f"{where}: {_some(there - here)} only there, {_some(here - there)} only here. To load what both have, "
            "pass load_module_strict=False."
        )
    excluded = [name for name in parameters if f"{WEIGHT}/{name}" not in index.tensors]
    if excluded:
        raise CheckpointError(
            f"{request.folder} was saved with exclude_frozen_parameters: it lacks {_some(excluded)}. To keep the "
            "weights that the model has of these, pass load_module_strict=False."
        )


def _check_optimizer(index: Index, states: EngineStates, folder: Path) -> None:
    if states.optimizer_class is not None and index.optimizer is None:
        raise CheckpointError(
            f"{folder} has no optimizer states: it was saved without an optimizer. Pass load_optimizer_states=False."
        )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") or "none"


def _prepare_optimizer_tensors(
    what: str, index: Index, tensors: list[LogicalTensor], states: EngineStates
) -> dict[int, tuple[OptimizerTensor, list[str]]]:
    """Makes the optimizer's states exist and compares them with the stored ones.

    Returns each tensor that the optimizer steps, with the names of the parameters in it.

    States that this engine had not had before go again if anything is wrong.
    """
    found: dict[int, tuple[OptimizerTensor, list[str]]] = {id(t): (t, []) for t in states.optimizer_tensors()}
    for tensor in tensors:
        stepped = states.param_state(tensor.parameter).optimizer_tensor
        if stepped is not None:
            found[id(stepped)][1].append(tensor.name)
    made: list[OptimizerTensor] = []
    failure: Exception | None = None
    try:
        for stepped, names in found.values():
            stored = {name: index.state_names_of(name) - {WEIGHT} for name in names}
            if not any(stored.values()):
                continue
            if not stepped.state:
                made.append(stepped)
                states.init_states([stepped])
            for name, state_names in stored.items():
                if state_names and state_names != set(stepped.state_dtypes()):
                    theirs = index.optimizer["class"] if index.optimizer else None
                    raise CheckpointError(
                        f"its optimizer, {theirs}, keeps {_some(state_names)} of {name}; this engine's, "
                        f"{states.optimizer_class}, keeps {_some(stepped.state_dtypes())}. Pass "
                        "load_optimizer_states=False to load the weights alone."
                    )
    except Exception as error:
        failure = error
    try:
        raise_if_any_failed(what, failure)
    except CheckpointError:
        for stepped in made:
            stepped.drop_state()
        raise
    return found


def _fill(
    model: nn.Module, stored: StoredCheckpoint, tensors: list[LogicalTensor], states: EngineStates, optimizer: bool
) -> None:
    index = stored.index
    without: list[str] = []
    for tensor in tensors:
        state = states.param_state(tensor.parameter)
        if not state.is_local:
            continue
        state_names = [WEIGHT]
        if optimizer and state.optimizer_tensor is not None:
            state_names += state.optimizer_tensor.state_dtypes()
        for state_name in state_names:
            key = f"{state_name}/{tensor.name}"
            if key in index.tensors:
                state.write(state_name, _read_shard(stored, key, tensor))
            elif state_name != WEIGHT:
                state.write(state_name, torch.zeros(tensor.local_shape))
                without.append(tensor.name)
    for name, buffer in persistent_buffers(model):
        if f"{BUFFER}/{name}" in index.tensors:
            buffer.copy_(stored.read(f"{BUFFER}/{name}"))
    if without and dist.get_rank() == 0:
        logger().warning("no optimizer states are stored of %s: these start at zero", _some(set(without)))


def _read_shard(stored: StoredCheckpoint, key: str, tensor: LogicalTensor) -> Tensor:
    """This rank's shard of one tensor `<state name>/<name>`, put together of its chunks."""
    if len(tensor.chunks) == 1:
        return stored.read(key, tensor.chunks[0].logical)
    local = torch.empty(tensor.local_shape, dtype=stored.index.tensors[key].dtype)
    for chunk in tensor.chunks:
        chunk.of(local).copy_(stored.read(key, chunk.logical))
    return local


def _restore_optimizer_tensors(index: Index, optimizer_tensors: dict[int, tuple[OptimizerTensor, list[str]]]) -> None:
    """Puts scalar states and hyperparameters back."""
    if index.optimizer is None:
        return
    stored = index.optimizer
    for stepped, names in optimizer_tensors.values():
        known = [name for name in names if name in stored["group_of"]]
        if not any(index.state_names_of(name) - {WEIGHT} for name in names):
            stepped.drop_state()
        if not known:
            continue
        groups = {stored["group_of"][name] for name in known}
        scalars = [stored["scalars"][name] for name in known]
        chosen = max(scalars, key=lambda values: values.get("step", 0))
        stepped.set_scalars(chosen)
        apply_hyperparameters(stepped.group, stored["groups"][stored["group_of"][known[0]]])
        if dist.get_rank() == 0 and (len(groups) > 1 or any(values != chosen for values in scalars)):
            logger().warning(
                "%s had hyperparameters or step counts of their own, and share one optimizer group here: "
                "those of %s count",
                _some(known),
                known[0],
            )


def _log(index: Index, request: LoadRequest, tensors: list[LogicalTensor]) -> None:
    before = {"pp": 1, **index.layout}
    changed = [key for key in request.layout if request.layout[key] != before.get(key)]
    what = "weights and optimizer states" if request.optimizer else "weights"
    logger().info("loaded %s: %s", request.folder, what)
    if changed:
        rows = [(key, f"{before.get(key)} -> {request.layout[key]}") for key in changed]
        anew = sum(
            {stored.chunk for stored in index.tensors[f"{WEIGHT}/{tensor.name}"].chunks}
            != {chunk.logical for chunk in tensor.chunks}
            for tensor in tensors
            if f"{WEIGHT}/{tensor.name}" in index.tensors
        )
        rows.append(("cut anew", f"{anew} of {len(tensors)} parameters, as rank 0 has them"))
        log_table("checkpoint resharded", rows)
