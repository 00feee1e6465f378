"""`overlap`: shared experts run while tokens travel, and not a bit of what is trained differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, train, with_options
from tests.tolerances import assert_equal_runs, assert_same_bits


@pytest.mark.sample("alltoall", "alltoall_etp_first", "unshare")
@pytest.mark.parametrize(
    ("dispatcher", "split", "stage", "recipe", "options"),
    [
        ("alltoall", (1, 2, 2), 3, Recipe("deepseek_v3", lengths=(12, 5, 9, 3)), {}),
        ("alltoall_etp_first", (2, 2, 2), 2, Recipe("glm4_moe", checkpointing="reentrant"), {"recompute": True}),
        ("allgather", (1, 2, 2), 1, Recipe("deepseek_v3", checkpointing="plain", implementation="grouped_mm"), {}),
        ("replicated", (4, 1, 2), 3, Recipe("glm4_moe"), {}),
        ("replicated", (2, 2, 1), 0, Recipe("glm4_moe", implementation="grouped_mm"), {}),
        ("alltoall", (2, 2, 2), 1, Recipe("qwen2_moe"), {}),
    ],
    ids=["alltoall", "alltoall_etp_first", "allgather", "unshare", "all_reduce", "before"],
)
def test_not_a_bit_differs(
    launcher: Launcher,
    dispatcher: str,
    split: tuple[int, int, int],
    stage: int,
    recipe: Recipe,
    options: dict[str, bool],
) -> None:
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage, dispatcher=dispatcher)
    recipe = replace(recipe, dp=layout.dp, steps=2)
    one, other = (
        launcher.run(4, train, recipe=recipe, layout=with_options(layout, overlap=on, **options))[0]
        for on in (False, True)
    )
    assert_equal_runs(other, train_unsharded(recipe))
    assert_same_bits(one, other)
