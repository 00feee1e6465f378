"""Rows that a dispatcher picks expert by expert are not sorted again: which forward runs where."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ds_etp.patches.transformers import grouped_mm as sorted_experts
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine


def sorted_calls(recipe: Recipe, layout: Layout) -> int:
    """How often one forward of a model runs experts on sorted rows."""
    original = sorted_experts._forward
    calls: list[Any] = []

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    engine = make_engine(recipe, layout)
    sorted_experts._forward = count
    try:
        engine.backward(recipe.compute_loss(engine, recipe.batch(0, 0, dist.get_rank() // layout.tp)))
    finally:
        sorted_experts._forward = original
    engine.destroy()
    return len(calls)


@pytest.mark.parametrize(
    ("implementation", "layout", "calls"),
    [
        ("grouped_mm", Layout(world=2, ep=2, dispatcher="alltoall"), 2),
        ("grouped_mm", Layout(world=2, ep=2, dispatcher="allgather"), 2),
        ("grouped_mm", Layout(world=2, tp=2, ep=2), 2),
        ("grouped_mm", Layout(world=2, tp=2, etp=2), 2),
        ("grouped_mm", Layout(world=2, etp=2, dispatcher="alltoall"), 2),
        ("grouped_mm", Layout(world=2, etp=2, dispatcher="allgather"), 2),
        ("eager", Layout(world=2, ep=2), 0),
    ],
    ids=str,
)
def test_both_layers(launcher: Launcher, implementation: str, layout: Layout, calls: int) -> None:
    recipe = Recipe(implementation=implementation, dp=layout.dp)
    assert launcher.run(2, sorted_calls, recipe=recipe, layout=layout) == [calls, calls]
