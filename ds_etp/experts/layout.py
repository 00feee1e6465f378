"""Layout of expert weights: how they are sharded over ep and etp, and put together again.

Legend: E experts, H hidden size, I intermediate size. A shard is `I / etp` columns of `E / ep` experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_etp.errors import ConfigError
from ds_etp.parallel.topology import Topology

SizeKind = Literal["experts", "intermediate"]  # E, I


class UnsupportedExperts(ConfigError):
    """An experts module whose layout ds_etp doesn't know."""


@dataclass(frozen=True)
class ShardSpec:
    """How one kind of expert parameter `[E, ...]` is sharded over etp, whatever its sizes.

    Attributes:
        dim: the dimension that holds I. None: no dimension does, as with the bias of a down projection. Every etp
            rank then holds all of it and one of them adds it.
        fused_chunks: how many chunks of I lie one after the other in `dim`: 2 where gate and up are concatenated.
        interleave: entries of `dim` for each column of I: 2 where gate and up are interleaved.
        has_zero_compute_rows: whether more rows than E may follow, of experts that have no weights (longcat_flash).
    """

    dim: int | None
    fused_chunks: int = 1
    interleave: int = 1
    has_zero_compute_rows: bool = False


@dataclass(frozen=True)
class ParameterLayout:
    """How one expert parameter is sharded over ep and etp.

    Attributes:
        shape: of the whole parameter.
        dim: the dimension that is sharded over etp; None: every etp rank holds all of it, and rank 0 adds it.
        fused_chunks: equal chunks of `dim`, each of which is sharded.
        experts: chunks of dimension 0, each of which is dealt out over ep: E, and what follows.
    """

    shape: tuple[int, ...]
    dim: int | None
    fused_chunks: int = 1
    experts: tuple[int, ...] = ()

    def widths(self, topology: Topology) -> tuple[list[list[int]], list[list[int]] | None]:
        """What each rank has of each chunk: `[chunk][ep rank]` rows, and `[chunk][etp rank]` entries of `dim`."""
        rows = [[count // topology.ep] * topology.ep for count in self.experts or self.shape[:1]]
        if self.dim is None:
            return rows, None
        width = self.shape[self.dim] // self.fused_chunks // topology.etp
        return rows, [[width] * topology.etp for _ in range(self.fused_chunks)]

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """The shape of one shard."""
        shape = list(self.shape)
        shape[0] //= topology.ep
        if self.dim is not None:
            shape[self.dim] //= topology.etp
        return tuple(shape)

    def local_experts(self, full: Tensor, topology: Topology, ep_index: int) -> Tensor:
        """The experts of one ep index, whole."""
        return take_chunks(full, 0, self.widths(topology)[0], ep_index)

    def shard(self, full: Tensor, topology: Topology, ep_index: int, etp_index: int) -> Tensor:
        """One rank's shard, a view of `full` where there is one chunk, a new tensor where there are more."""
        return self.take_columns(self.local_experts(full, topology, ep_index), topology, etp_index)

    def join_columns(self, peers: Sequence[Tensor], topology: Topology) -> Tensor:
        """Some experts, whole, from what each etp rank has of them."""
        columns = self.widths(topology)[1]
        return peers[0] if columns is None else join_chunks(peers, self.dim or 0, columns)

    def take_columns(self, whole: Tensor, topology: Topology, etp_index: int) -> Tensor:
        """What one etp rank has of some whole experts."""
        columns = self.widths(topology)[1]
        return whole if columns is None or self.dim is None else take_chunks(whole, self.dim, columns, etp_index)

    def unshard(self, shards: Sequence[Sequence[Tensor]]) -> Tensor:
        """The full parameter from `shards[ep_index][etp_index]`."""
        topology = Topology(len(shards) * len(shards[0]), ep=len(shards), etp=len(shards[0]))
        whole = [self.join_columns(peers, topology) for peers in shards]
        return join_chunks(whole, 0, self.widths(topology)[0])


def take_chunks(full: Tensor, dim: int, widths: list[list[int]], index: int) -> Tensor:
    """What rank `index` has of a tensor whose dimension `dim` is cut chunk by chunk."""
    if len(widths[0]) == 1:
        return full
    starts = [sum(map(sum, widths[:chunk])) + sum(shares[:index]) for chunk, shares in enumerate(widths)]
    pieces = [full.narrow(dim, start, shares[index]) for start, shares in zip(starts, widths, strict=True)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def join_chunks(shards: Sequence[Tensor], dim: int, widths: list[list[int]]) -> Tensor:
    """The reverse of `take_chunks`."""
    split = [shard.split([shares[index] for shares in widths], dim) for index, shard in enumerate(shards)]
    return torch.cat([pieces[chunk] for chunk in range(len(widths)) for pieces in split], dim)


@dataclass(frozen=True)
class ExpertsLayout:
    """The layout of one experts module.

    Attributes:
        num_experts, hidden_size, intermediate_size: E, H, I of the unsharded module.
        parameters: layout by parameter name; the module has no other parameters.
        adapter: the mixin for a calling convention other than `experts(x [T, H], index [T, K], weights [T, K])`:
            a subclass of `ds_etp.experts.sharded.ShardedExperts`.
        sizes: the module's attributes that hold E or I, by name; see `ds_etp.experts.sizes`.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    parameters: dict[str, ParameterLayout]
    adapter: type[Any] | None = None
    sizes: Mapping[str, SizeKind] = field(default_factory=dict)

    @property
    def spare_experts(self) -> int:
        """How many rows follow those of the experts, at most. They are dealt out over ep too."""
        return max((sum(parameter.experts[1:]) for parameter in self.parameters.values()), default=0)


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """A parameter's shape, also while ZeRO-3 has it partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def apply_specs(
    module: nn.Module, specs: dict[str, ShardSpec], adapter: type[Any] | None = None
) -> ExpertsLayout | str:
    """The layout of a module whose parameters are sharded so; or, in a phrase, why that doesn't fit the module.

    Args:
        module: the unsharded module; its parameters may be partitioned by ZeRO-3.
        specs: by parameter name.
        adapter: see `ExpertsLayout`.
    """
    shapes = {name: full_shape(parameter) for name, parameter in module.named_parameters()}
    if set(shapes) != set(specs):
        return f"its parameters are {', '.join(sorted(shapes)) or 'none'}, and {', '.join(sorted(specs))} are known"
    listed = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
    misfit = f"{listed} don't fit together"
    exact = [name for name, spec in specs.items() if not spec.has_zero_compute_rows]
    if any(len(shape) < 2 for shape in shapes.values()) or not exact:
        return misfit
    num_experts = shapes[exact[0]][0]
    columns: set[int] = set()  # what the parameters say I is
    others: set[int] = set()  # their other sizes, which are H
    for name, spec in specs.items():
        shape = shapes[name]
        if spec.dim is not None:
            if not 0 < spec.dim < len(shape) or shape[spec.dim] % (spec.fused_chunks * spec.interleave):
                return misfit
            columns.add(shape[spec.dim] // (spec.fused_chunks * spec.interleave))
        others.update(size for dim, size in enumerate(shape) if dim not in (0, spec.dim))
        if shape[0] < num_experts or (shape[0] != num_experts and not spec.has_zero_compute_rows):
            return misfit
    if len(columns) != 1 or len(others) != 1 or not num_experts:
        return misfit
    parameters = {
        name: ParameterLayout(
            shape=shapes[name],
            dim=spec.dim,
            fused_chunks=spec.fused_chunks,
            experts=(num_experts, shapes[name][0] - num_experts) if spec.has_zero_compute_rows else (),
        )
        for name, spec in specs.items()
    }
    return ExpertsLayout(num_experts, others.pop(), columns.pop(), parameters, adapter)
