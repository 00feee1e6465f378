"""What a parameter of a split model knows of the whole: a mark that `deepspeed.zero.GatheredParameters` looks for.

Only at ZeRO-3, where DeepSpeed gathers parameters; at other stages `parameter.data` is the shard whatever one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.checkpoint.assembly import assemble
from ds_etp.checkpoint.chunks import LocalChunk, Shape, expert_chunks, logical_tensors
from ds_etp.errors import CheckpointError
from ds_etp.experts.sharded import Shard, sharded_modules
from ds_etp.parallel.process_groups import ExpertGroups

_MARK = "ds_etp_split"
Part = tuple[Shape, tuple[LocalChunk, ...]]


@dataclass(frozen=True, eq=False)
class SplitParameter:
    """How a parameter is split beside ZeRO.

    Attributes:
        name: in the model.
        shape: of the whole.
        parts: by rank, in the group's order, the shape of its shard and what of the whole that is. Empty: every rank
            has the whole.
        group: of those ranks; None where there are none.
        modules: whose forward computes with the shard.
        fault: why it can't be put together; None where it can.
    """

    name: str
    shape: Shape = ()
    parts: Mapping[int, Part] | None = None
    group: dist.ProcessGroup | None = None
    modules: tuple[weakref.ref[nn.Module], ...] = ()
    fault: str | None = None

    def gather(self, shard: Tensor) -> Tensor:
        """The whole parameter, from this rank's shard. Collective over the group."""
        assert self.parts is not None
        rank = dist.get_rank()

        def fetch(holder: int, shape: Shape) -> Tensor:
            part = shard.contiguous() if holder == rank else shard.new_empty(shape)
            dist.broadcast(part, src=holder, group=self.group)
            return part

        return assemble(shard.new_empty(self.shape), self.parts, fetch)

    def put_back(self, whole: Tensor, shard: Tensor) -> None:
        """Fills this rank's shard from the whole."""
        assert self.parts is not None
        for chunk in self.parts[dist.get_rank()][1]:
            chunk.of(shard).copy_(whole[chunk.logical.slices()])


def split_of(parameter: Any) -> SplitParameter | None:
    """A parameter's mark; None for one that isn't a split model's."""
    mark: SplitParameter | None = getattr(parameter, _MARK, None)
    return mark


def mark_split_parameters(model: nn.Module, groups: ExpertGroups) -> None:
    """Marks what is split over etp, ep and tp; and over tp also what is not, since ZeRO's groups then aren't the world.

    Collective over the tensor-parallel group.
    """
    owners: dict[int, list[weakref.ref[nn.Module]]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(weakref.ref(module))
    marks = {**_tensor_marks(model, groups), **_expert_marks(model, groups)}
    for name, parameter in model.named_parameters():
        mark = marks.get(name)
        if mark is not None:
            setattr(parameter, _MARK, replace(mark, modules=tuple(owners[id(parameter)])))


def _expert_marks(model: nn.Module, groups: ExpertGroups) -> dict[str, SplitParameter]:
    topology, peers = groups.topology, groups.expert_model_parallel
    if peers.size == 1:
        return {}
    marks = {}
    for path, module in sharded_modules(model):
        shard: Shard = module.ds_etp_shard
        for name, layout in shard.layout.parameters.items():
            shape = layout.local_shape(topology)
            parts = {rank: (shape, expert_chunks(layout, _of_rank(shard, rank, groups))) for rank in peers.ranks}
            marks[f"{path}.{name}"] = SplitParameter(f"{path}.{name}", layout.shape, parts, peers.group)
    return marks


def _of_rank(shard: Shard, rank: int, groups: ExpertGroups) -> Shard:
    topology = groups.topology
    return replace(shard, ep_index=topology.index_in("ep", rank), etp_index=topology.index_in("expt_tp", rank))


def _tensor_marks(model: nn.Module, groups: ExpertGroups) -> dict[str, SplitParameter]:
    """Of everything but experts, where there is tensor parallelism."""
    if groups.tp.size == 1:
        return {}
    own: dict[str, tuple[Shape, Part]] | str
    try:
        tensors = logical_tensors(model, groups.topology, dist.get_rank())
        own = {t.name: (t.shape, (t.local_shape, t.chunks)) for t in tensors if t.kind == "tensor"}
    except CheckpointError as error:
        own = str(error)
    by_rank: list[Any] = [None] * groups.tp.size
    dist.all_gather_object(by_rank, own, group=groups.tp.group)
    fault = next((said for said in by_rank if isinstance(said, str)), None)
    marks = {}
    for name, parameter in model.named_parameters():
        if fault is not None and getattr(parameter, "tensor_model_parallel", False):
            marks[name] = SplitParameter(name, fault=fault)
        elif fault is not None or name not in own:
            marks[name] = SplitParameter(name)
        else:
            parts = {rank: held[name][1] for rank, held in zip(groups.tp.ranks, by_rank, strict=True)}
            marks[name] = SplitParameter(name, by_rank[0][name][0], parts, groups.tp.group)
    return marks
