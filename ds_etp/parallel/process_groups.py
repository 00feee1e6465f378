"""Process groups of the expert path, made of a topology, each with one owner.

An engine owns its `expt_tp` and `ep` groups. DeepSpeed keeps the other two, `expert_model_parallel` and
`expert_dp`, in a table of its own, keyed by a name that holds only their size (`ep_size_4`). Engines whose
groups have the same ranks share the entry, and the last one to leave takes it down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from deepspeed.utils import groups as host

from ds_etp.errors import config_error
from ds_etp.parallel.topology import GroupKind, Topology


@dataclass(frozen=True)
class ProcessGroupInfo:
    """The ranks this process works with along one axis, itself included.

    Attributes:
        ranks: global ranks, in axis order.
        index: this process's place in `ranks`.
        group: their process group; None where the process is alone.
    """

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """How many peers there are, this process included."""
        return len(self.ranks)


@dataclass
class _RegisteredGroups:
    """One entry of DeepSpeed's expert group table and the engines that hold it."""

    topology: tuple[int, int, int]
    model_parallel: dist.ProcessGroup
    data_parallel: dist.ProcessGroup
    holders: set[int] = field(default_factory=set)


# DeepSpeed's table is global to the process, so who holds which entry has to be as well.
_registered: dict[str, _RegisteredGroups] = {}


def group_name(topology: Topology) -> str:
    """The name DeepSpeed knows the expert groups by. It parses the number back out."""
    return f"ep_size_{topology.expert_model_parallel}"


def _key(topology: Topology) -> tuple[int, int, int]:
    """What the ranks of an entry follow from."""
    return topology.world, topology.expert_model_parallel, topology.pp


def check_group_name_free(topology: Topology) -> None:
    """Refuses a topology whose entry in DeepSpeed's table is taken by other groups.

    Raises:
        ConfigError: on every rank alike, as every rank has the same table.
    """
    name = group_name(topology)
    registered, entry = host._EXPERT_PARALLEL_GROUP.get(name), _registered.get(name)
    ours = entry is not None and entry.model_parallel is registered and entry.topology == _key(topology)
    if registered is not None and not ours:
        raise config_error(
            "expert_tensor_parallel.ep_size",
            topology.ep,
            f"needs DeepSpeed's expert group {name!r} (ep {topology.ep} x etp {topology.etp} = "
            f"{topology.expert_model_parallel}), which a DeepSpeed MoE layer or another engine of this process has",
            works="sizes with another product ep x etp, or this layout after the other engine's destroy()",
        )


class ExpertGroups:
    """The process groups of one engine's expert path.

    Making one is collective over the world: every rank makes every group in the same order.

    Attributes:
        topology: the sizes the groups were made from.
        name: the name of the entry in DeepSpeed's table.
        expt_tp, ep, expert_model_parallel, expert_dp, tp, pp: peers along each axis.
        zero_group: the process group of `expert_dp`, over which ZeRO partitions; also where this process is alone.

    Args:
        topology: the sizes.
        pipeline: the group of the ranks with this one's place in the other stages; None without pipeline.
    """

    def __init__(self, topology: Topology, pipeline: dist.ProcessGroup | None = None) -> None:
        rank = dist.get_rank()
        self.topology = topology
        self.name = group_name(topology)
        self._private: list[dist.ProcessGroup] = []
        entry = self._register_with_deepspeed()
        self.expert_model_parallel = self._peers("expert_model_parallel", rank, entry.model_parallel)
        self.expert_dp = self._peers("expert_dp", rank, entry.data_parallel)
        self.zero_group = entry.data_parallel
        self.expt_tp = self._private_peers("expt_tp", rank)
        self.ep = self._private_peers("ep", rank)
        attention = host.get_tensor_model_parallel_group() if topology.tp > 1 else None
        self.tp = self._peers("tp", rank, attention)
        self.pp = self._peers("pp", rank, pipeline)

    def _peers(self, kind: GroupKind, rank: int, group: dist.ProcessGroup | None) -> ProcessGroupInfo:
        ranks = self.topology.group_of(kind, rank)
        return ProcessGroupInfo(ranks, ranks.index(rank), group if len(ranks) > 1 else None)

    def _private_peers(self, kind: GroupKind, rank: int) -> ProcessGroupInfo:
        all_groups = self.topology.groups(kind)
        if len(all_groups[0]) == 1:
            return self._peers(kind, rank, None)
        group = _make_groups(all_groups, rank)
        self._private.append(group)
        return self._peers(kind, rank, group)

    def _register_with_deepspeed(self) -> _RegisteredGroups:
        topology, rank = self.topology, dist.get_rank()
        check_group_name_free(topology)
        entry = _registered.get(self.name)
        if entry is None or self.name not in host._EXPERT_PARALLEL_GROUP:
            # Nothing there, or what we once put there went when the process group was torn down.
            entry = _RegisteredGroups(
                _key(topology),
                _make_groups(topology.groups("expert_model_parallel"), rank),
                _make_groups(topology.groups("expert_dp"), rank),
            )
            _registered[self.name] = entry
            host._EXPERT_PARALLEL_GROUP[self.name] = entry.model_parallel
            host._EXPERT_DATA_PARALLEL_GROUP[self.name] = entry.data_parallel
            host._EXPERT_PARALLEL_GROUP_RANKS[self.name] = list(topology.group_of("expert_model_parallel", rank))
            host._EXPERT_DATA_PARALLEL_GROUP_RANKS[self.name] = list(topology.group_of("expert_dp", rank))
        entry.holders.add(id(self))
        return entry

    def destroy(self) -> None:
        """Takes down what this owner made. Calling it twice does nothing more."""
        if not dist.is_initialized():
            self._private.clear()
            _registered.pop(self.name, None)
            return
        for group in self._private:
            dist.destroy_process_group(group)
        self._private.clear()
        entry = _registered.get(self.name)
        if entry is None or id(self) not in entry.holders:
            return
        entry.holders.discard(id(self))
        if entry.holders:
            return
        del _registered[self.name]
        if host._EXPERT_PARALLEL_GROUP.get(self.name) is entry.model_parallel:
            for table in (
                host._EXPERT_PARALLEL_GROUP,
                host._EXPERT_DATA_PARALLEL_GROUP,
                host._EXPERT_PARALLEL_GROUP_RANKS,
                host._EXPERT_DATA_PARALLEL_GROUP_RANKS,
            ):
                table.pop(self.name, None)
            dist.destroy_process_group(entry.model_parallel)
            dist.destroy_process_group(entry.data_parallel)


def _make_groups(all_groups: tuple[tuple[int, ...], ...], rank: int) -> dist.ProcessGroup:
    """Makes every group of one kind, as torch.distributed wants of all ranks; returns this rank's."""
    own: dist.ProcessGroup | None = None
    for ranks in all_groups:
        group: dist.ProcessGroup = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    assert own is not None
    return own
