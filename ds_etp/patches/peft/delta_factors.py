"""The two factors of an adapter's product on experts, from every PEFT release that has them.

PEFT 0.21 gives them out by `get_delta_factors`. Releases 0.18 to 0.20 (read: 0.18.1, 0.19.1, 0.20.0) multiply them at
once, in `get_delta_weight`. Its numbers are the same, so that the factors are taken from A and B here. Can go with
PEFT 0.20.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

METHOD = "get_delta_factors"


def delta_factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """`left [E, ., r]`, `right [E, r, .]` and the scaling of `left @ right`, laid out as the experts' weights are.

    Args:
        wrapper: PEFT's `ParamWrapper` around experts.
        adapter: its name.
    """
    if hasattr(wrapper, METHOD):
        left, right, scaling = wrapper.get_delta_factors(adapter)
        return left, right, scaling
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    # Rows of A: expert by expert. Columns of B: rank by rank, the experts of one rank side by side.
    by_expert_a = a.unflatten(0, (experts, -1))  # [E, r, in]
    by_expert_b = b.unflatten(1, (-1, experts)).movedim(2, 0)  # [E, out, r]
    dtype = wrapper.get_param().dtype
    # PEFT 0.18 takes every weight for one [E, in, out]; 0.19 on asks the experts module.
    if getattr(wrapper, "_did_swap_in_out_features", False):
        left, right = by_expert_b, by_expert_a
    else:
        left, right = by_expert_a.mT, by_expert_b.mT
    return left.to(dtype), right.to(dtype), wrapper.scaling[adapter]
