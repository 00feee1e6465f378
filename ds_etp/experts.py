"""The swap: an experts module becomes a sharded one, in place.

Parameter objects keep their identity, so an optimizer, a parameter list, a hook or a state-dict key made
before stays valid. Only the module's class changes, to one made of a mixin and its own class: the family's
own forward computes on the shard, under whichever experts implementation the user chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ds_etp.layouts import ExpertsLayout, full_shape
from ds_etp.plans import Plan
from ds_etp.topology import Topology


@dataclass(frozen=True)
class Shard:
    """What a sharded experts module knows of itself.

    Attributes:
        path: where the module is in the model.
        layout: the layout of the whole module.
        topology: the sizes it is split by.
        ep_index, etp_index: which shard this rank holds.
        plan: how tokens reach it.
    """

    path: str
    layout: ExpertsLayout
    topology: Topology
    ep_index: int
    etp_index: int
    plan: Plan

    def slice(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of the full parameter `name`, in memory of its own."""
        if self.topology.expert_model_parallel == 1:
            return full
        part = self.layout.parameters[name].shard(full, self.topology, self.ep_index, self.etp_index)
        # A view would keep the full tensor alive.
        shared = part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        return part.clone(memory_format=torch.contiguous_format) if shared else part.contiguous()


class ShardedExperts:
    """The mixin in front of a family's experts class."""

    ds_etp_shard: Shard

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens `[T, H]`, expert indices and weights `[T, K]`, to `[T, H]`: the unsharded module's result."""
        plan = self.ds_etp_shard.plan
        rows = plan.dispatch(hidden_states, top_k_index, top_k_weights)
        partial = super().forward(rows.x, rows.index, rows.weights)  # type: ignore[misc]
        return plan.combine(partial, rows)


@cache
def _sharded_class(family: type[nn.Module]) -> type[nn.Module]:
    return type(f"Sharded{family.__name__}", (ShardedExperts, family), {"__module__": family.__module__})


def adopt(module: nn.Module, shard: Shard) -> None:
    """Gives a module whose parameters were sliced its new class and its local sizes."""
    module.ds_etp_shard = shard  # type: ignore[assignment]
    for name, value in vars(module).items():
        # Families count their experts under names of their own (num_experts, num_local_experts, ...).
        if type(value) is int and "expert" in name and value == shard.layout.num_experts:
            setattr(module, name, value // shard.topology.ep)
    module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]


def shard_in_place(module: nn.Module, shard: Shard) -> None:
    """Shrinks a module's parameters to this rank's shard and adopts it. Not for ZeRO-3 partitioned ones."""
    for name, parameter in module.named_parameters():
        parameter.data = shard.slice(name, parameter.data)
    adopt(module, shard)


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every sharded experts module of a model, with its path."""
    for path, module in model.named_modules():
        if isinstance(module, ShardedExperts):
            yield path, module


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of the sharded experts, with its path in the model."""
    for path, module in sharded_modules(model):
        for name, parameter in module.named_parameters():
            yield f"{path}.{name}", parameter


def check_sizes(model: nn.Module) -> None:
    """Asserts that each rank holds its share of every expert parameter, to the element."""
    for path, module in sharded_modules(model):
        shard: Shard = module.ds_etp_shard
        layout, topology = shard.layout, shard.topology
        weights = layout.num_experts * layout.hidden_size * layout.intermediate_size // topology.expert_model_parallel
        expected = {name: parameter.parts * weights for name, parameter in layout.parameters.items()}
        for name, parameter in module.named_parameters():
            held = prod(full_shape(parameter))
            assert held == expected[name], f"{path}.{name} holds {held} elements, its share is {expected[name]}"
