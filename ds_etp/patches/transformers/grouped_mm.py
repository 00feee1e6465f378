"""transformers' `grouped_mm` experts forward, for rows that are already sorted by expert.

The family's own sorts (row, expert) pairs, multiplies expert by expert, and puts results back in order: several
copies of all pairs, forward and backward. Dispatchers copy each pair once, into that order, and sum results by row,
whatever their order is. The multiplications are transformers' own (as called here from 5.8 to 5.24; with 5.0's, whose
arguments are in another order, the family's own forward runs), and so is what lies between them.

All of this looks at private names of transformers. Where a release has others, nothing breaks, and it is slower:
`host_fault` says so for the log.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from ds_etp.experts.sharded import ShardedExperts, SortedForward
from ds_etp.patches.transformers.experts_flags import experts_implementation

_ARGUMENTS = ["input", "weight", "offs", "bias", "is_transposed"]
_NAMES = ("_grouped_linear", "grouped_mm_experts_forward", "ALL_EXPERTS_FUNCTIONS", "use_experts_implementation")
_FLAGS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


@cache
def _arguments_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _is_grouped_linear(function: Any) -> bool:
    """Whether a function takes rows `[a, in]`, by expert, and weights of each expert, as `_forward` gives them."""
    return function is not None and _arguments_of(function) == _ARGUMENTS


@cache
def _chooses(forward: Any) -> bool:
    """Whether a forward is the one that `use_experts_implementation` makes, which runs what the config names.

    Not where a class has a forward of its own around that one: it has its reasons.
    """
    interface = inspect.getclosurevars(forward).nonlocals.get("experts_interface")
    return interface is not None and interface is getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)


def _is_hosts_own() -> bool:
    """Whether `grouped_mm` names transformers' own implementation, and not one of the user's."""
    own = getattr(moe, "grouped_mm_experts_forward", None)
    return own is not None and getattr(moe, "ALL_EXPERTS_FUNCTIONS", {}).get("grouped_mm") is own


def _family_forward(module: nn.Module) -> Any:
    """The forward of a module's own class, split or not."""
    families = (kind for kind in type(module).__mro__ if not issubclass(kind, ShardedExperts))
    return next(vars(kind)["forward"] for kind in families if "forward" in vars(kind))


def sorted_forward(module: nn.Module) -> SortedForward | None:
    """`forward(x [a, H], index [a, 1], weights [a, 1], has_sentinels)` to `[a, H]`, for rows by their local index.

    None where the module would not run transformers' own `grouped_mm` now, or does something of its own beside it.
    """
    linear: Any = getattr(moe, "_grouped_linear", None)
    if (
        experts_implementation(module) != "grouped_mm"
        or not _is_grouped_linear(linear)
        or not _chooses(_family_forward(module))
        or not _is_hosts_own()
        or not all(hasattr(module, flag) for flag in _FLAGS)
        or getattr(module, "has_post_expert_norm", False)
    ):
        return None
    return lambda x, index, weights, has_sentinels: _forward(module, linear, x, index, weights, has_sentinels)


def host_fault() -> str:
    """What `sorted_forward` needs and the installed transformers has not, in a phrase; empty where all is there."""
    for name in (
        "_grouped_linear",
        "grouped_mm_experts_forward",
        "ALL_EXPERTS_FUNCTIONS",
        "use_experts_implementation",
    ):
        if not hasattr(moe, name):
            return f"has no {name}"
    linear: Any = getattr(moe, "_grouped_linear")  # noqa: B009 - a name that may go
    if not _is_grouped_linear(linear):
        return f"has _grouped_linear({', '.join(_arguments_of(linear))}), not ({', '.join(_ARGUMENTS)})"

    class Probe(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(self) -> None: ...

    probe = moe.use_experts_implementation(Probe)(None)
    if not _chooses(type(probe).forward):
        return "chooses an experts implementation in another way (use_experts_implementation)"
    missing = [flag for flag in _FLAGS if not hasattr(probe, flag)]
    return f"puts no {', '.join(missing)} on experts modules" if missing else ""


def _forward(
    module: Any, linear: Callable[..., Tensor], x: Tensor, index: Tensor, weights: Tensor, has_sentinels: bool
) -> Tensor:
    expert = index[:, 0].contiguous()
    numbers = torch.arange(module.num_experts, device=x.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    # Sentinels are behind the last expert's rows, where grouped multiplications write nothing: what is there has to be
    # taken out after each, and in backward before each (the same masks).
    nobodys = index >= module.num_experts if has_sentinels else None
    if nobodys is not None:
        expert, x = expert.clamp(max=module.num_experts - 1), x.masked_fill(nobodys, 0)
    first, gated = ("gate_up_proj", module._apply_gate) if module.has_gate else ("up_proj", module.act_fn)

    def project(name: str, rows: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        return known(linear(rows, getattr(module, name), ends, bias=bias, is_transposed=module.is_transposed))

    def known(rows: Tensor) -> Tensor:
        return rows if nobodys is None else rows.masked_fill(nobodys, 0)

    hidden = gated(project(first, x))
    if module.has_bias:
        return (project("down_proj", hidden) * weights).to(x.dtype)
    # The same sums, weighted where a row has I / etp columns instead of H: three passes, forward and backward.
    return project("down_proj", known(hidden * weights).to(hidden.dtype)).to(x.dtype)
