"""Unsharded tensors under Hugging Face names, one at a time: gathered from a live engine, or read from a checkpoint.

They are put together on one rank of a live engine, or in the one process that reads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.checkpoint.assembly import assemble
from ds_etp.checkpoint.chunks import LogicalTensor, Shape, logical_tensors, persistent_buffers, whole_chunk
from ds_etp.checkpoint.format import BUFFER, WEIGHT, StoredCheckpoint
from ds_etp.checkpoint.hub import SHARD_SIZE, WEIGHTS, HubFolder, TensorSource, TensorSpec, ToHub
from ds_etp.checkpoint.pipeline_stages import all_gather_stages, union_over_stages
from ds_etp.checkpoint.states import EngineStates
from ds_etp.errors import CheckpointError
from ds_etp.parallel.consensus import all_gather_object, broadcast_object, raise_if_any_failed
from ds_etp.parallel.topology import Topology


@dataclass(frozen=True)
class _Source:
    """Where a tensor of the whole model comes from: the first pipeline stage that has it.

    Attributes:
        spec: its unsharded type and shape.
        first: the first rank of that pipeline stage.
        holders: the ranks of that pipeline stage that together hold all of it; replicas of them are not asked.
    """

    spec: TensorSpec
    first: int
    holders: tuple[int, ...]


class LiveTensors:
    """The tensors of a live engine's model. Collective: every rank makes one and calls it in the same order.

    Args:
        engine: a DeepSpeed engine; its ZeRO-3 parameters must not be in use (no forward under way).
        topology: how the model is split.
        states: where weights are read: the masters, or those that the model computes with.
        exclude_frozen: leave out parameters that aren't trained.
        model: the part of the engine's module whose tensors they are; None for all of it.
        root: the rank where they are put together.
        device: where on that rank; None for its CPU.
    """

    def __init__(
        self,
        engine: Any,
        topology: Topology,
        states: EngineStates,
        *,
        exclude_frozen: bool = False,
        model: nn.Module | None = None,
        root: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._device, self._states = engine.device, states
        self._root, self._home = root, device
        rank = dist.get_rank()
        model = engine.module if model is None else model
        self._tensors = {t.name: t for t in logical_tensors(model, topology, rank)}
        self._buffers = dict(persistent_buffers(model))
        self._first, self._writes = topology.stage_of(rank)[0], rank == root
        wanted = [t for t in self._tensors.values() if t.parameter.requires_grad or not exclude_frozen]
        own = self._own_sources(topology, wanted)
        asked = rank in {peer for source in own.values() for peer in source.holders}
        shards = {t.name: (t.local_shape, t.chunks) for t in wanted}
        shards |= {name: (tuple(b.shape), (whole_chunk(tuple(b.shape)),)) for name, b in self._buffers.items()}
        self._shards = all_gather_object(shards if asked else None)
        self._sources = union_over_stages(all_gather_stages(own, topology))
        self.specs = {name: source.spec for name, source in self._sources.items()}

    def _own_sources(self, topology: Topology, wanted: list[LogicalTensor]) -> dict[str, _Source]:
        """Of what this rank's pipeline stage has."""
        first = self._first
        nearest = self._root if self._root in topology.stage_of(first) else first
        holders = {
            "whole": (nearest,),
            "tensor": topology.group_of("tp", nearest),
            "expert": topology.group_of("expert_model_parallel", nearest),
        }
        found = {t.name: _Source(TensorSpec(self._dtype(t), t.shape), first, holders[t.kind]) for t in wanted}
        for name, buffer in self._buffers.items():
            found[name] = _Source(TensorSpec(buffer.dtype, tuple(buffer.shape), False), first, (nearest,))
        return found

    def _dtype(self, tensor: LogicalTensor) -> torch.dtype:
        return self._states.param_state(tensor.parameter).dtype(WEIGHT)

    def full(self, name: str) -> Tensor | None:
        """See `TensorSource`."""
        source, rank = self._sources[name], dist.get_rank()
        here = source.first == self._first
        local = self._local(name, source.holders) if here else torch.empty(0)
        if not self._writes:
            if rank in source.holders:
                dist.send(local.to(self._device).contiguous(), dst=self._root)
            return None
        spec = source.spec

        def fetch(holder: int, shape: Shape) -> Tensor:
            if holder == rank:
                return local
            part = torch.empty(shape, dtype=spec.dtype, device=self._device)
            dist.recv(part, src=holder)
            return part

        full = torch.empty(spec.shape, dtype=spec.dtype, device=self._home)
        return assemble(full, {holder: self._shards[holder][name] for holder in source.holders}, fetch)

    @property
    def device(self) -> torch.device:
        """Where parts are sent from and received."""
        device: torch.device = self._device
        return device

    def own(self, name: str) -> LogicalTensor | None:
        """What this rank's stage has of a parameter; None where it is another stage's."""
        return self._tensors.get(name)

    def _local(self, name: str, holders: tuple[int, ...]) -> Tensor:
        """This rank's shard, gathered over its ZeRO group to those that `full` asks; the others get an empty tensor.

        Collective over that group.
        """
        if name in self._buffers:
            return self._buffers[name].detach()
        state = self._states.param_state(self._tensors[name].parameter)
        shards = [state.read(WEIGHT, holder) for holder in holders]
        return next((shard.detach() for shard in shards if shard is not None), torch.empty(0))


class StoredTensors:
    """The tensors of a checkpoint: the master weights, in the type the model computed in.

    Args:
        stored: an open checkpoint.
        dtype: the type that the model computed in.
    """

    def __init__(self, stored: StoredCheckpoint, dtype: torch.dtype) -> None:
        index = stored.index
        self._stored, self._keys = stored, {}
        self.specs: dict[str, TensorSpec] = {}
        for name, shape in index.parameters.items():
            key = f"{WEIGHT}/{name}"
            if key not in index.tensors:
                raise CheckpointError(
                    f"{stored.folder} holds no weight of {name}: it was saved with exclude_frozen_parameters. "
                    "Load it into the model it was made from, and export that with ds_etp.save_pretrained."
                )
            self._keys[name] = key
            self.specs[name] = TensorSpec(dtype, shape)
        for name in index.buffers:
            self._keys[name] = f"{BUFFER}/{name}"
            tensor = index.tensors[self._keys[name]]
            self.specs[name] = TensorSpec(tensor.dtype, tensor.shape, False)

    def full(self, name: str) -> Tensor:
        """See `TensorSource`."""
        return self._stored.read(self._keys[name]).to(self.specs[name].dtype)


def full_state_dict(tensors: TensorSource, aliases: Mapping[str, str]) -> dict[str, Tensor] | None:
    """Everything at once, as `save_pretrained(state_dict=...)` wants it: on rank 0's CPU; None on other ranks.

    Args:
        tensors: the model's.
        aliases: tied names, each with the name its tensor is under.
    """
    found = {name: tensors.full(name) for name in tensors.specs}
    state = {name: tensor for name, tensor in found.items() if tensor is not None}
    if not state:
        return None
    state.update({alias: state[name] for alias, name in aliases.items() if name in state})
    return state


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has more than one, with its first."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def write_weights(
    folder: Path,
    tensors: TensorSource,
    to_hub: ToHub,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    weights_name: str = WEIGHTS,
) -> None:
    """Writes safetensors files of a model, with an index where there is more than one.

    Args:
        folder: where to; made if it isn't there.
        tensors: the model's. Those of a live engine make this collective: rank 0 writes.
        to_hub: from the model's names to the hub's.
        dtype: what parameters are cast to; None keeps their types.
        max_shard_size: of one file, as in `save_pretrained`.
        weights_name: of the file; files of a larger model get numbers in it.

    Raises:
        CheckpointError: a file could not be written; on every rank alike.
    """
    live = isinstance(tensors, LiveTensors)
    failure: Exception | None = None
    target: HubFolder | None = None
    if not live or dist.get_rank() == 0:
        try:
            target = HubFolder(folder, weights_name, tensors.specs, to_hub, dtype, max_shard_size)
        except Exception as error:
            failure = error
    groups = target.conversion_groups if target is not None else []
    try:
        for names in broadcast_object(groups) if live else groups:
            # After a failure too: the other ranks are on their way to the next tensor.
            found = {name: tensor for name in names if (tensor := tensors.full(name)) is not None}
            if target is not None and failure is None:
                try:
                    target.add(found)
                except Exception as error:
                    failure = error
        if target is not None and failure is None:
            try:
                target.finish()
            except Exception as error:
                failure = error
    except BaseException:
        if target is not None:
            target.discard()
        raise
    if target is not None and failure is not None:
        target.discard()
    what = f"writing a model to {folder}"
    if live:
        raise_if_any_failed(what, failure)
    elif failure is not None:
        raise CheckpointError(f"{what} failed: {failure}") from failure
