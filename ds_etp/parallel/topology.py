"""Sizes to ranks and groups: pure arithmetic, no torch.

The dense and the expert path lay the same ranks out differently:

    dp  = world / (tp * cp * pp)     dense order,  fastest first: tp, cp, dp, pp
    edp = world / (etp * ep * pp)    expert order, fastest first: etp, ep, edp, pp

Pipeline stages are the slowest axis of both, so a stage holds the same ranks on either path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, get_args

from ds_etp.errors import ConfigError

GroupKind = Literal["tp", "cp", "dp", "pp", "expt_tp", "ep", "expert_dp", "expert_model_parallel"]
GROUP_KINDS: tuple[GroupKind, ...] = get_args(GroupKind)
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """Parallel sizes of the dense path (tp, cp, pp) and of the expert path (etp, ep, pp).

    Raises:
        ConfigError: a size is below 1, or a path's sizes do not tile the world.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "tp", "cp", "pp", "etp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a size: parallel sizes are at least 1.")
        for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            product = prod(getattr(self, name) for name in names)
            if self.world % product:
                sizes = " x ".join(f"{name} {getattr(self, name)}" for name in names)
                raise ConfigError(f"{sizes} = {product} does not divide world {self.world}.")

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense path."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert path: how many ranks hold the same expert shard."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def expert_model_parallel(self) -> int:
        """EP x ETP: how many different expert shards one pipeline stage has."""
        return self.etp * self.ep

    def groups(self, kind: GroupKind) -> Groups:
        """All groups of one kind, each a tuple of ranks in axis order, groups in rank order."""
        return _groups(self, kind)

    def group_of(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The group of one kind that `rank` is in."""
        axes, others = _axes(self, kind)
        first = sum(rank // stride % size * stride for size, stride in others)
        return tuple(first + offset for offset in _offsets(axes))

    def stage_of(self, rank: int) -> range:
        """The ranks of the pipeline stage that `rank` is in; all of them without pipeline."""
        size = self.world // self.pp
        first = rank // size * size
        return range(first, first + size)

    def index_in(self, kind: GroupKind, rank: int) -> int:
        """The place of `rank` in its group of one kind."""
        return self.group_of(kind, rank).index(rank)


Axes = list[tuple[int, int]]  # the size of each, and how far neighbours along it are apart; the fastest first


@lru_cache(maxsize=256)
def _groups(topology: Topology, kind: GroupKind) -> Groups:
    axes, others = _axes(topology, kind)
    offsets = _offsets(axes)
    return tuple(tuple(first + offset for offset in offsets) for first in sorted(_offsets(others)))


def _axes(topology: Topology, kind: GroupKind) -> tuple[Axes, Axes]:
    """The axes along which the ranks of one group differ, and the others."""
    dense = (("tp", topology.tp), ("cp", topology.cp), ("dp", topology.dp), ("pp", topology.pp))
    expert = (("expt_tp", topology.etp), ("ep", topology.ep), ("expert_dp", topology.edp), ("pp", topology.pp))
    varied: set[str] = {"expt_tp", "ep"} if kind == "expert_model_parallel" else {kind}
    axes: Axes = []
    others: Axes = []
    stride = 1
    for name, size in dense if kind in dict(dense) else expert:
        (axes if name in varied else others).append((size, stride))
        stride *= size
    return axes, others


def _offsets(axes: Axes) -> list[int]:
    """The ranks that differ from rank 0 along these axes only, itself first."""
    ranks = [0]
    for size, stride in axes:
        ranks = [rank + place * stride for place in range(size) for rank in ranks]
    return ranks
