"""DeepSpeed's `torch_autocast` in bfloat16: as close to the fp32 truth as plain DeepSpeed's, within a factor of two.

The factor, and why every token takes every expert: see `test_bf16`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.parity.half_runs import expert_comm_dtypes, train_half
from tests.parity.test_bf16 import EVERY_EXPERT, FACTOR, errors
from tests.sharded import Layout

EXPERTS = "transformers.models.mixtral.modeling_mixtral.MixtralExperts"


def autocast(**keys: Any) -> tuple[tuple[str, Any], ...]:
    return (("torch_autocast", {"enabled": True, "dtype": "bfloat16", **keys}),)


@pytest.mark.sample("0-(2, 2, 1)-eager", "1-(1, 2, 1)-grouped_mm", "3-(1, 1, 2)-eager")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("split", [(1, 2, 1), (1, 1, 2), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autocast(launcher: Launcher, stage: int, split: tuple[int, int, int], implementation: str) -> None:
    """Weights stay fp32, experts compute in bf16, and their results are summed in the hidden states' own dtype."""
    tp, etp, ep = split
    layout = Layout(2 * tp, tp=tp, etp=etp, ep=ep, stage=stage, extra=autocast())
    plain = Layout(layout.dp, stage=stage, extra=layout.extra, with_block=False)
    recipe = Recipe(dp=layout.dp, changes=EVERY_EXPERT, implementation=implementation)
    truth = train_unsharded(recipe)
    got = errors(launcher.run(layout.world, train_half, recipe=recipe, layout=layout)[0], truth)
    allowed = errors(launcher.run(layout.dp, train_half, recipe=recipe, layout=plain)[0], truth)
    for kind, error in got.items():
        # Plain DeepSpeed has no norm at stage 0. One bf16 rounding of a loss or a norm is always allowed.
        floor = 2**-8 if kind in ("loss", "norm") else 0.0
        limit = FACTOR * max(floor, 0.0 if allowed[kind] != allowed[kind] else allowed[kind])
        assert error <= limit, f"{kind} is off by {error:.1e}; plain autocast by {allowed[kind]:.1e}"


@pytest.mark.sample(0)
@pytest.mark.parametrize("stage", [2, 3])
def test_experts_sent_in_low_precision(launcher: Launcher, stage: int) -> None:
    """A listed class is found though its modules were split; routers, not listed, are sent in their own dtype."""
    listed = Layout(2, etp=2, stage=stage, extra=autocast(lower_precision_safe_modules=[EXPERTS]))
    usual = Layout(2, etp=2, stage=stage, extra=autocast())
    for layout, dtype in ((listed, torch.bfloat16), (usual, torch.float32)):
        for experts, routers in launcher.run(2, expert_comm_dtypes, recipe=Recipe(dp=2), layout=layout):
            assert (experts, routers) == ({dtype}, {torch.float32})
