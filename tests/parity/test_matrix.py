"""Sharded training equals unsharded training, over ZeRO stages, layouts, families and optimizers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from tests.hosts import refused_key
from tests.launcher import CaseFailed, Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, train
from tests.tolerances import assert_equal_runs

# (tp, etp, ep) on four ranks.
SPLITS = [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 4, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)]


# What `make compat` runs at the corners of the host range: ZeRO-3 with tp needs the newest DeepSpeed.
CORNER_CASES = {(stage, split) for stage in (0, 1, 2) for split in [(1, 2, 2), (2, 2, 1), (2, 4, 1)]}
CORNER_CASES |= {(3, (1, 2, 2)), (3, (2, 2, 1))}


def _cases() -> list[Any]:
    cases = []
    for stage, split in itertools.product((0, 1, 2, 3), SPLITS):
        optimizers = ("sgd", "adamw") if stage % 2 == 0 else ("adamw", "sgd")
        combinations = list(zip(("mixtral", "qwen3_moe"), optimizers, strict=True))
        marks = [pytest.mark.compat] if (stage, split) in CORNER_CASES else []
        if not marks:  # they take turns: a split meets both families under both optimizers
            combinations = [combinations[(stage // 2 + SPLITS.index(split)) % 2]]
        for family, optimizer in combinations:
            label = f"{stage}-{'x'.join(map(str, split))}-{family}-{optimizer}"
            cases.append(pytest.param(stage, split, family, optimizer, id=label, marks=marks))
    return cases


def host_sums_norms_over_heads() -> bool:
    """Whether AutoTP sums the gradients of Qwen3's q_norm and k_norm, which older hosts leave partial."""
    try:
        from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES
    except ImportError:  # 0.18 has no plans
        return False
    style = "replicated_with_grad_allreduce"
    return style in SUPPORTED_STYLES and style in Qwen3MoeConfig.base_model_tp_plan.values()


@pytest.mark.sample("2-2x2x1-mixtral-sgd")
@pytest.mark.parametrize(("stage", "split", "family", "optimizer"), _cases())
def test_four_ranks(launcher: Launcher, stage: int, split: tuple[int, int, int], family: str, optimizer: str) -> None:
    """Every stage and split; families and optimizers take turns, but for the corners' cases."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    recipe = Recipe(family=family, optimizer=optimizer, dp=layout.dp)
    if (refused := refused_key(stage, tp)) is not None:
        with pytest.raises(CaseFailed, match=rf"ConfigError: {refused}"):
            launcher.run(4, train, recipe=recipe, layout=layout)
        return
    if family == "qwen3_moe" and tp > 1 and not host_sums_norms_over_heads():
        with pytest.raises(CaseFailed, match=r"tensor_parallel\.autotp_size"):
            launcher.run(4, train, recipe=recipe, layout=layout)
        return
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))
