"""AutoTP is shown a model's tensor-parallel plan without its experts.

AutoTP (deepspeed 0.19.5 to 0.19.8) turns down the whole plan of a model that names a style it doesn't know,
and all MoE models of transformers 5 do (`moe_tp_experts`, `packed_colwise`). The entries of the experts
modules are ours to split; without them the plan is one AutoTP knows. Can go when AutoTP skips styles of
modules it doesn't split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.tensor_parallel import config as host

from ds_etp.config.tp_plan import module_pattern
from ds_etp.patches.base import swapped
from ds_etp.patches.peft.expert_lora import is_peft_model

# The style transformers 5.0 has for routers in its tp_plans. A router serves experts split by ds_etp whole.
_ROUTER_STYLE = "ep_router"
# Absent before 0.19, whose AutoTP reads no plans.
_PLAN = "_get_hf_tp_plan"


def drop_expert_entries(plan: dict[str, str], expert_paths: Iterable[str]) -> dict[str, str]:
    """A plan without the entries that are about experts modules, what is in them, or their routers.

    Args:
        plan: pattern to style; `*` stands for a layer number.
        expert_paths: exact paths of the modules. A pattern may leave out leading parts of a path (`model.`).

    Returns:
        The other entries, in order. `mlp.gate_proj` and `mlp.shared_experts.up_proj` are others.
    """
    paths = list(expert_paths)

    def is_about_experts(pattern: str) -> bool:
        parts = pattern.split(".")
        # What is in an experts module too: a plan names the family's own parameters, and a replaced module has others.
        owners = [".".join(parts[: end + 1]) for end in range(len(parts))]
        return any(module_pattern(owner).fullmatch(path) for owner in owners for path in paths)

    return {
        pattern: style for pattern, style in plan.items() if style != _ROUTER_STYLE and not is_about_experts(pattern)
    }


@contextmanager
def dense_tp_plan(model: Any, expert_paths: Iterable[str]) -> Iterator[None]:
    """While AutoTP partitions `model`, hides the entries of its experts from it.

    A model of PEFT has the plan of the one inside, of which AutoTP would miss what the inner model's class adds,
    the output layer.
    """
    paths = list(expert_paths)
    if not hasattr(host, _PLAN):
        yield
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _get_hf_tp_plan(asked: Any) -> dict[str, str] | None:
            if asked is not model:
                other: dict[str, str] | None = original(asked)
                return other
            plan = original(asked.get_base_model() if is_peft_model(asked) else asked)
            return drop_expert_entries(plan, paths) or None if plan else plan

        return _get_hf_tp_plan

    with swapped(host, "_get_hf_tp_plan", make):
        yield


def hf_tp_plan(model: Any) -> dict[str, str]:
    """The tensor-parallel plan that AutoTP reads from a model; empty where it goes by names of its own."""
    return getattr(host, _PLAN, lambda _: None)(model) or {}


@dataclass(frozen=True)
class DensePlan:
    """What AutoTP is shown of a model, its experts apart.

    Attributes:
        entries: pattern to style, in order; empty where the model has no plan, and AutoTP goes by names of its own.
        refused: the styles for which AutoTP turns the whole plan down.
    """

    entries: dict[str, str]
    refused: tuple[str, ...] = ()


def dense_plan(model: Any, expert_paths: Iterable[str]) -> DensePlan:
    """The tensor-parallel plan that AutoTP is shown of a model whose experts are at `expert_paths`."""
    entries = drop_expert_entries(hf_tp_plan(model), expert_paths)
    if not entries:
        return DensePlan({})
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    def is_refused(style: str) -> bool:
        try:
            TPPlanConverter.convert({"layer": style})
        except ValueError:
            return True
        return False

    return DensePlan(entries, tuple(style for style in sorted(set(entries.values())) if is_refused(style)))


# What AutoTP (0.19.8) leaves on a parameter whose gradient it sums.
_SUMMED = "_ds_grad_allreduce_registered"


@contextmanager
def skip_frozen_grad_hooks(model: Any) -> Iterator[None]:
    """While AutoTP partitions `model`, keeps it from hooking into gradients that frozen parameters don't have.

    It sums the gradients of norms over split heads (Qwen3's q_norm and k_norm), and fails where they are frozen,
    as under LoRA. Can go when AutoTP asks whether a parameter has a gradient.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        setattr(parameter, _SUMMED, True)
    try:
        yield
    finally:
        for parameter in frozen:
            delattr(parameter, _SUMMED)
