"""Process groups of the expert path, made of a topology, each with one owner.

An engine owns its `expt_tp` and `ep` groups. DeepSpeed keeps the other two, `expert_model_parallel` and
`expert_dp`, in a table of its own, keyed by a name that holds only their size (`ep_size_4`). Engines whose
groups have the same ranks share the entry, and the last one to leave takes it down.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch.distributed as dist
from deepspeed.utils import groups as host

from ds_etp.errors import config_error
from ds_etp.parallel.topology import GroupKind, Topology
from ds_etp.patches.torch.subgroups import new_subgroup

# The groups that only some dispatchers send over, and that only their engine knows.
PRIVATE_KINDS: tuple[GroupKind, ...] = ("expt_tp", "ep")


@dataclass(frozen=True)
class ProcessGroupInfo:
    """The ranks this process works with along one axis, itself included.

    Attributes:
        ranks: global ranks, in axis order.
        index: this process's place in `ranks`.
    """

    ranks: tuple[int, ...]
    index: int
    _group: dist.ProcessGroup | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of `ranks`; None where the process is alone.

        Raises:
            RuntimeError: it was not made. None would send over all ranks of the world.
        """
        if self._group is None and self.size > 1:
            raise RuntimeError(f"no process group was made for ranks {list(self.ranks)}: no dispatcher was to use it")
        return self._group

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

    Making one is collective over the world: every rank makes its groups in the same order, one of each kind.

    Attributes:
        topology: the sizes the groups were made from.
        name: the name of the entry in DeepSpeed's table.
        expt_tp, ep, expert_model_parallel, expert_dp, tp, pp: peers along each axis.
        zero_group: the process group of `expert_dp`, over which ZeRO partitions; also where this process is alone.

    Args:
        topology: the sizes.
        pipeline: the group of the ranks with this one's place in the other stages; None without pipeline.
        private: which of `PRIVATE_KINDS` to make, alike on all ranks; ranks and places are known of the others too.
    """

    def __init__(
        self,
        topology: Topology,
        pipeline: dist.ProcessGroup | None = None,
        private: Collection[GroupKind] = PRIVATE_KINDS,
    ) -> None:
        rank = dist.get_rank()
        self.topology = topology
        self.name = group_name(topology)
        self._private: list[dist.ProcessGroup] = []
        entry = self._register_with_deepspeed()
        self.expert_model_parallel = self._peers("expert_model_parallel", rank, entry.model_parallel)
        self.expert_dp = self._peers("expert_dp", rank, entry.data_parallel)
        self.zero_group = entry.data_parallel
        self.expt_tp = self._private_peers("expt_tp", rank, private)
        self.ep = self._private_peers("ep", rank, private)
        attention = host.get_tensor_model_parallel_group() if topology.tp > 1 else None
        self.tp = self._peers("tp", rank, attention)
        self.pp = self._peers("pp", rank, pipeline)

    def _peers(self, kind: GroupKind, rank: int, group: dist.ProcessGroup | None) -> ProcessGroupInfo:
        ranks = self.topology.group_of(kind, rank)
        return ProcessGroupInfo(ranks, ranks.index(rank), group if len(ranks) > 1 else None)

    def _private_peers(self, kind: GroupKind, rank: int, private: Collection[GroupKind]) -> ProcessGroupInfo:
        group = None
        if kind in private and len(self.topology.group_of(kind, rank)) > 1:
            group = make_group(self.topology, kind)
            self._private.append(group)
        return self._peers(kind, rank, group)

    def require(self, kind: Literal["expt_tp", "ep"]) -> ProcessGroupInfo:
        """The peers of one of `PRIVATE_KINDS`, with their group, for others than dispatchers. Collective."""
        peers: ProcessGroupInfo = getattr(self, kind)
        if peers.size > 1 and peers._group is None:
            peers = self._private_peers(kind, dist.get_rank(), (kind,))
            setattr(self, kind, peers)
        return peers

    def _register_with_deepspeed(self) -> _RegisteredGroups:
        topology, rank = self.topology, dist.get_rank()
        check_group_name_free(topology)
        entry = _registered.get(self.name)
        if entry is None or self.name not in host._EXPERT_PARALLEL_GROUP:
            # Nothing there, or what we once put there went when the process group was torn down.
            entry = _RegisteredGroups(_key(topology), *_make_registered(topology))
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
            for group in dict.fromkeys((entry.model_parallel, entry.data_parallel)):
                dist.destroy_process_group(group)


def make_group(topology: Topology, kind: GroupKind) -> dist.ProcessGroup:
    """This rank's process group of one kind. Every rank makes its own, in the same order."""
    return new_subgroup(topology.group_of(kind, dist.get_rank()), partial(topology.groups, kind), f"ds_etp_{kind}")


def _make_registered(topology: Topology) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The two groups of an entry. DeepSpeed wants them where a rank is alone, too: one group of one does for both."""
    sizes = topology.expert_model_parallel, topology.edp
    alone = _make_group_of_one() if 1 in sizes else None
    model_parallel = make_group(topology, "expert_model_parallel") if alone is None or sizes[0] > 1 else alone
    data_parallel = make_group(topology, "expert_dp") if alone is None or sizes[1] > 1 else alone
    return model_parallel, data_parallel


def _make_group_of_one() -> dist.ProcessGroup:
    world = dist.get_world_size()
    return new_subgroup((dist.get_rank(),), lambda: [(rank,) for rank in range(world)], "ds_etp_self")
