"""The swap: an experts module becomes a sharded one, in place.

Parameter objects keep their identity, so an optimizer, a parameter list, a hook or a state-dict key made
before stays valid. Only the module's class changes, to one made of a mixin and its own class: the family's
own forward computes on the shard, under whichever experts implementation the user chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_etp import aliases
from ds_etp.dispatch.base import DispatchOptions, DispatchOutput, TokenDispatcher
from ds_etp.experts.graph_break import not_compiled
from ds_etp.experts.layout import ExpertsLayout, full_shape
from ds_etp.experts.shared_overlap import SharedExpertOverlap
from ds_etp.monitor.router_load import RouterLoad
from ds_etp.parallel.topology import Topology

SortedForward = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Shard:
    """What a sharded experts module knows of itself.

    Attributes:
        path: where the module is in the model.
        layout: the layout of the whole module.
        topology: the sizes it is split by.
        ep_index, etp_index: which shard this rank holds.
        dispatcher: how tokens reach it.
        recompute: whether backward sends the rows again and runs the experts again, instead of keeping both.
        shared_overlap: the block's shared experts, where they overlap with the combine.
        sorted_forward: what the family's forward now is for rows that come expert by expert, without sorting them, if
            it has such a thing; None: it never has. Its last argument says whether rows may be nobody's, behind all
            others and with an index one above the last expert, which it then skips.
        experts_per_token: K, where an adapter has to know.
        router_load: what counts tokens and rows, where the run shows them.
    """

    path: str
    layout: ExpertsLayout
    topology: Topology
    ep_index: int
    etp_index: int
    dispatcher: TokenDispatcher
    recompute: bool = False
    shared_overlap: SharedExpertOverlap | None = None
    sorted_forward: Callable[[Any], SortedForward | None] | None = None
    experts_per_token: int | None = None
    router_load: RouterLoad | None = None

    def is_whole(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter has still to be sliced: one that two modules share is sliced with the first."""
        return full_shape(parameter) == self.layout.parameters[name].shape

    def slice(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of the full parameter `name`, in memory of its own."""
        if self.topology.expert_model_parallel == 1:
            return full
        part = self.layout.parameters[name].shard(full, self.topology, self.ep_index, self.etp_index)
        # A view would keep the full tensor alive.
        shared = part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        return part.clone(memory_format=torch.contiguous_format) if shared else part.contiguous()


class ShardedExperts:
    """The mixin in front of a family's experts class, for the calling convention of transformers 5.

    A subclass, given to `register_layout` as the adapter, serves a class that is called in another way: its
    `forward` takes what the class is called with, and hands `dispatch` tokens, indices and weights.
    """

    ds_etp_shard: Shard
    ds_etp_needs_counts: ClassVar[bool] = False  # whether `forward_rows` needs how many rows each expert has

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        aliases.rename_methods(cls)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        router_index: Tensor | None = None,
    ) -> Tensor:
        """Tokens `[T, H]`, expert indices and weights `[T, K]`, to `[T, H]`: the unsharded module's result.

        `router_index`: the router's choice, if that is another; only counted. From E on nothing counts.
        """
        partial, rows = self._partial(hidden_states, top_k_index, top_k_weights)
        shard = self.ds_etp_shard
        output = shard.dispatcher.combine(
            partial, rows, None if shard.shared_overlap is None else shard.shared_overlap.overlap_fn
        )
        if shard.router_load is not None and self.training:  # type: ignore[attr-defined]
            chosen = top_k_index if router_index is None else router_index
            shard.router_load.observe(chosen, output, shard.dispatcher.rows_sent(rows))
        return output

    def _partial(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, DispatchOutput]:
        """Partial outputs for the rows this rank's experts work on, and the dispatcher's notes of them."""
        noted: list[DispatchOutput] = []
        shard = self.ds_etp_shard
        local_weights, seen = self.forward_weights(), _weights_seen(self)

        def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if _weights_seen(self) != seen:
                raise RuntimeError(
                    f"{shard.path} has other weights in backward than it had in forward, so that recompute would run "
                    "it on those. Something replaces them while forward runs: set expert_tensor_parallel.recompute to "
                    "false"
                )
            with local_weights():
                forward = shard.sorted_forward(self) if shard.sorted_forward else None
                options = DispatchOptions(forward is not None, self.ds_etp_needs_counts)
                # In backward the same tokens go the way that is known.
                rows = shard.dispatcher.dispatch(x, index, weights, options, noted[0] if noted else None)
                if not noted:
                    noted.append(rows.without_tensors())
                if forward is not None and rows.by_expert:
                    return forward(rows.x, rows.index, rows.weights, rows.has_sentinels)
                return self.forward_rows(rows)

        if not (shard.recompute and torch.is_grad_enabled()):
            return run(x, index, weights), noted[0]
        return checkpoint(run, x, index, weights, use_reentrant=False), noted[0]

    def forward_weights(self) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the module's weights are those of the forward under way: by default, its parameters.

        Asked once in each forward. With `recompute` the context is entered again in backward, when whatever was set
        for the duration of the forward is gone.
        """
        return nullcontext

    def forward_rows(self, rows: DispatchOutput) -> Tensor:
        """`local_experts_forward` of what was dispatched."""
        return self.local_experts_forward(rows.x, rows.index, rows.weights)

    def local_experts_forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The family's own forward on rows `[a, H]` with local expert indices and weights `[a, k]`: `[a, H]`."""
        partial: Tensor = super().forward(x, index, weights)  # type: ignore[misc]
        return partial


# An adapter of a user's may call the method it overrides by its old name.
for _old, _new in aliases.ADAPTER_METHODS.items():
    setattr(ShardedExperts, _old, getattr(ShardedExperts, _new))


def _weights_seen(module: Any) -> tuple[Any, ...]:
    """What the family's forward would find as the module's weights, told apart by identity.

    A parametrization changes the class, `functional_call` the parameters, and an entry of the instance hides one.
    """
    hiding = {name: id(value) for name, value in vars(module).items() if name in module._parameters}
    return type(module), hiding, {name: id(value) for name, value in module._parameters.items()}


def _rank0_only_param(name: str) -> property:
    """A parameter that every etp rank holds whole and rank 0 adds.

    The others see zeros, and its gradient there is zeros, so that it counts once in the gradient norm too.
    """

    def get(module: Any) -> Tensor:
        parameter: Tensor = module._parameters[name]
        return parameter if module.ds_etp_shard.etp_index == 0 else parameter * 0

    return property(get)


@cache
def _sharded_class(family: type, mixin: type, once: tuple[str, ...]) -> type:
    body: dict[str, Any] = {"__module__": family.__module__, **{name: _rank0_only_param(name) for name in once}}
    return not_compiled(type(f"Sharded{family.__name__}", (mixin, family), body), "split experts")


def convert_module(module: nn.Module, shard: Shard) -> None:
    """Gives a module whose parameters were sliced its new class and its local sizes."""
    module.ds_etp_shard = shard  # type: ignore[assignment]
    layout, topology = shard.layout, shard.topology
    parts = {"experts": topology.ep, "intermediate": topology.etp}
    for name, kind in layout.sizes.items():
        setattr(module, name, vars(module)[name] // parts[kind])
    once = [name for name, parameter in layout.parameters.items() if parameter.dim is None and topology.etp > 1]
    mixin: type = layout.adapter or ShardedExperts
    module.__class__ = _sharded_class(type(module), mixin, tuple(once))  # type: ignore[arg-type]  # hash of Module


def shard_in_place(module: nn.Module, shard: Shard) -> None:
    """Shrinks a module's parameters to this rank's shard and adopts it. Not for ZeRO-3 partitioned ones."""
    for name, parameter in module.named_parameters():
        if shard.is_whole(name, parameter):
            parameter.data = shard.slice(name, parameter.data)
    convert_module(module, shard)


class LocalShards(list[nn.Parameter]):
    """Parameters for `deepspeed.zero.GatheredParameters` whose shards of this rank are wanted, not the whole."""


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
        for name, parameter in module.named_parameters():
            held, share = full_shape(parameter), shard.layout.parameters[name].local_shape(shard.topology)
            assert held == share, f"{path}.{name} holds {held}, its share is {share}"
