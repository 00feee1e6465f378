"""LoRA on split models equals LoRA on the unsharded model: losses, norms, adapters' gradients, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.launcher import Launcher
from tests.oracle import train_unsharded
from tests.peft.models import ATTENTION, BOTH, EXPERTS, ONLY_ATTENTION, ONLY_DOWN, LoraRecipe
from tests.sharded import Layout, train
from tests.tolerances import assert_equal_runs

STAGES = [0, 1, 2, 3]
# (tp, etp, ep) on four ranks.
SPLITS = [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 4, 1), (2, 1, 2), (4, 2, 1), (2, 2, 2)]


def check(launcher: Launcher, recipe: LoraRecipe, layout: Layout) -> None:
    """Trains sharded and unsharded, and compares everything."""
    recipe = replace(recipe, dp=layout.dp, steps=3)
    run = launcher.run(layout.world, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_experts_and_attention(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """Adapters on both, over stages and layouts; the tensor-parallel ones have attention's adapters split too."""
    tp, etp, ep = split
    check(launcher, BOTH, Layout(4, tp, etp, ep, stage))


@pytest.mark.parametrize(
    ("stage", "recipe", "split"),
    [
        (1, EXPERTS, (2, 4, 1)),
        (3, EXPERTS, (1, 2, 2)),
        (3, ONLY_DOWN, (2, 2, 1)),
        (0, ONLY_DOWN, (1, 1, 4)),
        (2, ONLY_ATTENTION, (2, 2, 1)),
        (3, ONLY_ATTENTION, (2, 1, 2)),
    ],
    ids=["experts-1", "experts-3", "down-3", "down-0", "attention-2", "attention-3"],
)
def test_some_of_them(launcher: Launcher, stage: int, recipe: LoraRecipe, split: tuple[int, int, int]) -> None:
    """Adapters on a part of the model."""
    tp, etp, ep = split
    check(launcher, recipe, Layout(4, tp, etp, ep, stage))


@pytest.mark.parametrize(
    ("stage", "changes", "layout"),
    [
        (2, {"optimizer": "adamw"}, {"tp": 2, "etp": 2}),
        (3, {"optimizer": "adamw"}, {"etp": 2, "ep": 2}),
        (3, {"optimizer": "adamw"}, {"tp": 2, "etp": 2, "zero_init": True}),
        (3, {}, {"ep": 2, "zero_init": True}),
        (1, {"family": "qwen3_moe", "implementation": "grouped_mm"}, {"tp": 2, "etp": 2, "ep": 2}),
        (1, {"accumulate": 2, "lengths": (12, 5, 9, 3)}, {"etp": 4}),
        (2, {"checkpointing": "reentrant"}, {"tp": 2, "etp": 2, "ep": 2}),
        (3, {"checkpointing": "plain"}, {"tp": 2, "etp": 4}),
        (3, {"pinned": (0, 1)}, {"ep": 4}),  # two of four ranks get no token
        (0, {"rows": 1, "lengths": (1,), "loss": "logits"}, {"tp": 4, "etp": 2}),
        (1, {}, {"tp": 2, "etp": 2, "plan": "alltoall"}),
        (2, {"modules": (*ATTENTION, "shared_expert.down_proj"), "family": "qwen2_moe"}, {"tp": 2, "etp": 2}),
        (2, {"options": (("use_rslora", True), ("rank_pattern", (("gate_up_proj", 2),)))}, {"etp": 2, "ep": 2}),
        (1, {"options": (("modules_to_save", ("mlp.experts",)),), "parameters": ()}, {"tp": 2, "etp": 2, "ep": 2}),
        (3, {"options": (("modules_to_save", ("gate",)),)}, {"tp": 2, "etp": 2}),
    ],
    ids=str,
)
def test_settings(launcher: Launcher, stage: int, changes: dict[str, Any], layout: dict[str, Any]) -> None:
    """What people train with, on adapters of both kinds."""
    check(launcher, replace(BOTH, **changes), Layout(4, stage=stage, **layout))


@pytest.mark.parametrize("split", [(1, 2, 1), (2, 2, 1)], ids=str)
def test_no_gradient_goes_in(launcher: Launcher, split: tuple[int, int, int]) -> None:
    """The first layer's experts get an input without gradient, under which plain ZeRO-3 lets go of weights early."""
    tp, etp, ep = split
    check(launcher, replace(EXPERTS, input_grads=False), Layout(4, tp, etp, ep, 3))
