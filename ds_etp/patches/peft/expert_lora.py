"""LoRA of PEFT (0.18 to 0.21) on split experts, through `target_parameters`.

PEFT wraps an experts module once for each parameter, and while the wrapper's forward runs, a parametrization
adds `B_e A_e` to the weights of every expert e. The adapters cover all experts and all columns, and stay whole
on every rank: ordinary dense parameters to ZeRO, checkpoints and PEFT's own saving. A rank makes only its
shard's part of the product, from slices of A and B. That is exact: a shard's weights get the same sum over the
world's tokens as without adapters, so the adapters' gradient is the sum of what the ranks' slices get.
DeepSpeed averages it over data-parallel ranks as it does for every dense parameter; tensor-parallel peers sum
it among themselves before.

The sum happens inside the experts' forward instead of around it, because ZeRO-3 has gathered the weights only
there. The adapters are registered with the experts module, so that ZeRO-3 gathers them with its own. By itself
it does so where they are read outside their modules in a forward of the engine, but not in `generate()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from deepspeed import zero
from torch import Tensor, nn

from ds_etp.errors import config_error
from ds_etp.experts.graph_break import not_compiled
from ds_etp.experts.sharded import Shard, sharded_modules
from ds_etp.parallel import autograd
from ds_etp.patches.peft.delta_factors import delta_factors

_INNER = "base_layer"
# What PEFT puts between a module and the name it had: `base_layer` of a tuner, or the two of modules_to_save.
_WRAPPING = {_INNER, "original_module", "modules_to_save"}


def plain_path(path: str) -> str:
    """A module's path as it was before PEFT wrapped it, `...mlp.experts` of `...mlp.experts.base_layer`."""
    kept: list[str] = []
    skip = False
    for part in path.split("."):
        if not skip and part not in _WRAPPING:
            kept.append(part)
        # The name after `modules_to_save` is the adapter's.
        skip = not skip and part == "modules_to_save"
    return ".".join(kept)


def is_peft_model(model: Any) -> bool:
    """Whether a model is PEFT's own class around one of transformers: its `save_pretrained` writes adapters."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has wrapped a part of the model."""
    return any(is_wrapper(module) for module in model.modules())


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is one that PEFT has put around another."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def expert_wrappers(model: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """The modules that PEFT wrapped around one experts module, the innermost first."""
    while path.rpartition(".")[2] == _INNER:
        path = path.rpartition(".")[0]
        yield path, model.get_submodule(path)


def split_adapters(model: nn.Module, *, zero3: bool) -> None:
    """Lets the wrappers around a model's split experts work on this rank's shard.

    Args:
        model: its experts are split.
        zero3: whether ZeRO-3 is going to partition its parameters.
    """
    for path, experts in sharded_modules(model):
        wrappers = [wrapper for _, wrapper in expert_wrappers(model, path)]
        if not wrappers:
            continue
        experts.ds_etp_active = []
        experts.__class__ = _adapted_class(type(experts))  # type: ignore[arg-type]
        for wrapper in wrappers:
            wrapper.__class__ = _split_class(type(wrapper))  # type: ignore[arg-type]
            for parameter in chain(wrapper.lora_A.parameters(), wrapper.lora_B.parameters()):
                if zero3:
                    zero.register_external_parameter(experts, parameter)


class AdaptedExperts:
    """The mixin in front of a sharded experts class that PEFT has wrapped.

    Attributes:
        ds_etp_active: wrappers whose forward is under way, each with its active adapters.
    """

    ds_etp_shard: Shard
    ds_etp_active: list[tuple[Any, list[str]]]

    def forward_weights(self) -> Callable[[], AbstractContextManager[None]]:
        """See `ShardedExperts.forward_weights`: the weights with the products of the adapters that are active now."""
        active = [(wrapper, adapter) for wrapper, adapters in self.ds_etp_active for adapter in adapters]
        return partial(_with_products, self, active)


@contextmanager
def _with_products(experts: Any, active: list[tuple[Any, str]]) -> Iterator[None]:
    weights = _adapted_weights(experts, active)
    # An entry of the instance hides the parameter from the family's forward alone: parameters have a dict of their own.
    vars(experts).update(weights)
    try:
        yield
    finally:
        for name in weights:
            del vars(experts)[name]


@cache
def _adapted_class(sharded: type[nn.Module]) -> type[nn.Module]:
    return type(f"Adapted{sharded.__name__}", (AdaptedExperts, sharded), {"__module__": sharded.__module__})


def _adapted_weights(experts: Any, active: list[tuple[Any, str]]) -> dict[str, Tensor]:
    """This rank's shards of the weights with these wrappers' and adapters' products, by parameter name."""
    shard: Shard = experts.ds_etp_shard
    dispatcher: Any = shard.dispatcher
    found = [(wrapper.parameter_name, *delta_factors(wrapper, adapter)) for wrapper, adapter in active]
    if not found:
        return {}
    # Tensor-parallel peers hold the same adapters and use other slices, or the same slices for other tokens.
    flat = autograd.copy_to_group(
        dispatcher.groups.tp,
        *(factor for _, left, right, _ in found for factor in (left, right)),
        reduce_dtype=dispatcher.reduce_dtype,
    )
    weights: dict[str, Tensor] = {}
    for place, (name, _, _, scaling) in enumerate(found):
        left, right = _sliced(shard, name, *flat[2 * place : 2 * place + 2])
        weight = weights.get(name, experts._parameters[name])
        # As PEFT does: in the weights' own type, also under autocast.
        with torch.autocast(device_type=weight.device.type, enabled=False):
            weights[name] = torch.baddbmm(weight, left, right, alpha=scaling)
    return weights


def _sliced(shard: Shard, name: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `left [E, ., r]` and the columns of `right [E, r, .]` whose product is this rank's shard."""
    layout, topology = shard.layout.parameters[name], shard.topology
    assert layout.dim is not None  # biases have no adapters
    factors = {1: left, 2: right}
    cut = layout.shard(factors[layout.dim], topology, shard.ep_index, shard.etp_index)
    own = {dim: layout.local_experts(factor, topology, shard.ep_index) for dim, factor in factors.items()}
    own[layout.dim] = cut
    return own[1], own[2]


@cache
def _split_class(wrapper: type[nn.Module]) -> type[nn.Module]:
    """PEFT's wrapper class, working on a shard. PEFT's own methods decide which adapters are active or merged."""

    class SplitParamWrapper(wrapper):  # type: ignore[misc, valid-type]
        ds_etp_wrapped_class = wrapper

        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            adapters = [name for name in active_adapters or () if name in self.lora_A]
            active = self.get_base_layer().ds_etp_active
            active.append((self, adapters))
            try:
                yield
            finally:
                active.pop()

        def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
            """This rank's shard of the product, which `merge` adds and `unmerge` subtracts."""
            left, right, scaling = delta_factors(self, adapter_name)
            left, right = _sliced(self.get_base_layer().ds_etp_shard, self.parameter_name, left, right)
            delta: Tensor = torch.bmm(left, right) * scaling
            return delta

        def merge(self, *args: Any, **kwargs: Any) -> None:
            self._refuse_partitioned()
            super().merge(*args, **kwargs)

        def unmerge(self) -> None:
            self._refuse_partitioned()
            super().unmerge()

        def _refuse_partitioned(self) -> None:
            if hasattr(self.get_param(), "ds_id"):
                raise config_error(
                    "zero_optimization.stage",
                    3,
                    "keeps weights in parts between passes, into which adapters cannot be merged or unmerged",
                    works="0, 1, 2",
                    next_step="Or write the adapter with ds_etp.save_pretrained(engine, folder), and merge it in one "
                    "process: PeftModel.from_pretrained(base, folder).merge_and_unload().",
                )

    SplitParamWrapper.__module__, SplitParamWrapper.__qualname__ = wrapper.__module__, wrapper.__qualname__
    return not_compiled(SplitParamWrapper, "adapters of split experts")
