"""transformers' grouped experts forward, for rows that are in the order of their experts already.

The family's own sorts (row, expert) pairs, multiplies expert by expert, and puts results back in order: several
copies of all pairs, forward and backward. Plans copy each pair once, into that order, and sum results by row, whatever
their order is. The multiplications are transformers' own (as called here from 5.8 to 5.24; with 5.0's, whose arguments
are in another order, the family's own forward runs), and so is what lies between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from ds_etp.layouts import ExpertsLayout

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
_ARGUMENTS = ["input", "weight", "offs", "bias", "is_transposed"]
_FLAGS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


def _grouped_linear() -> Callable[..., Tensor] | None:
    """Rows `[a, in]`, by expert, times weights of each expert: `[a, out]`. None in other releases."""
    found: Any = getattr(moe, "_grouped_linear", None)
    return found if found is not None and list(inspect.signature(found).parameters) == _ARGUMENTS else None


def sorted_forward(module: nn.Module, layout: ExpertsLayout) -> Forward | None:
    """`forward(x [a, H], index [a, 1], weights [a, 1])` to `[a, H]`, for rows in the order of their local index.

    None where the module would not run transformers' own `grouped_mm` now, or does something of its own beside it.
    """
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    own = getattr(moe, "grouped_mm_experts_forward", None)
    linear = _grouped_linear()
    if (
        linear is None
        or own is None
        or implementation != "grouped_mm"
        or moe.ALL_EXPERTS_FUNCTIONS.get("grouped_mm") is not own
        or layout.adapter is not None
        or not all(hasattr(module, flag) for flag in _FLAGS)
        or getattr(module, "has_post_expert_norm", False)
    ):
        return None
    return lambda x, index, weights: _forward(module, linear, x, index, weights)


def _forward(module: Any, linear: Callable[..., Tensor], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    expert = index[:, 0].contiguous()
    numbers = torch.arange(module.num_experts, device=x.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    first, gated = ("gate_up_proj", module._apply_gate) if module.has_gate else ("up_proj", module.act_fn)

    def project(name: str, rows: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        return linear(rows, getattr(module, name), ends, bias=bias, is_transposed=module.is_transposed)

    out = project("down_proj", gated(project(first, x))) * weights
    return out.to(x.dtype)
