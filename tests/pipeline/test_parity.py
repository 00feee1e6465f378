"""A pipeline with split experts trains as the unsharded model does, whatever its stages hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launcher import Launcher
from tests.oracle import Recipe, Run, train_unsharded
from tests.parity.test_bf16 import FACTOR, errors
from tests.pipeline.runs import Pipeline, train
from tests.sharded import Layout
from tests.tolerances import assert_equal_runs

# A pipeline's layers pass on rows alone, not router logits.
PLAIN = (("output_router_logits", False),)
TIED = (*PLAIN, ("tie_word_embeddings", True))
CASES = {
    "no block": (Pipeline(Layout(world=4, stage=1, with_block=False)), Recipe(changes=TIED)),
    "etp 2": (Pipeline(Layout(world=4, etp=2, stage=0)), Recipe(lengths=(12, 5), changes=PLAIN)),
    "ep 2": (Pipeline(Layout(world=4, ep=2, stage=1)), Recipe(optimizer="adamw", clip=0.0, changes=TIED)),
    "only embedding": (
        Pipeline(Layout(world=4, ep=2, stage=0), cuts=(1,), interval=1),
        Recipe(optimizer="adamw", clip=1.0, changes=TIED),
    ),
    "only head": (Pipeline(Layout(world=4, etp=2, stage=1), cuts=(3,), interval=1), Recipe(changes=PLAIN)),
    "tp 2": (Pipeline(Layout(world=4, tp=2, etp=2, stage=0), interval=1), Recipe(family="qwen3_moe", changes=PLAIN)),
    "tp 2, etp 4": (
        Pipeline(Layout(world=8, tp=2, etp=4, stage=1), cuts=(3,)),
        Recipe(optimizer="adamw", changes=TIED),
    ),
    "eight ranks": (Pipeline(Layout(world=8, etp=2, ep=2, stage=1)), Recipe(changes=TIED)),
    "four stages": (Pipeline(Layout(world=8, etp=2, stage=0), stages=4, cuts=(1, 2, 3)), Recipe(changes=TIED)),
}


def _run(launcher: Launcher, pipeline: Pipeline, recipe: Recipe) -> Run:
    run: Run = launcher.run(pipeline.layout.world, train, recipe=recipe, pipeline=pipeline)[0]
    return run


@pytest.mark.sample("etp 2", "only embedding", "tp 2, etp 4", "four stages")
@pytest.mark.parametrize("name", CASES)
def test_equals_unsharded(launcher: Launcher, name: str) -> None:
    pipeline, recipe = CASES[name]
    recipe = replace(recipe, dp=pipeline.dp, accumulate=2)
    assert_equal_runs(_run(launcher, pipeline, recipe), train_unsharded(recipe))


# BF16_Optimizer at stage 0, and at stage 1 where gradients are accumulated in fp32; ZeRO's own otherwise.
BF16 = {"0": {}, "1": {}, "1, fp32 sums": {"data_types": {"grad_accum_dtype": "fp32"}}}


@pytest.mark.sample("1, fp32 sums")
@pytest.mark.parametrize("kind", BF16)
def test_bf16(launcher: Launcher, kind: str) -> None:
    """As near to fp32 as the same pipeline without split experts; the gradient of a router that flips is not."""
    recipe = Recipe(dp=2, steps=4, accumulate=2, changes=TIED)
    found = []
    for with_block in (True, False):
        extra = tuple(BF16[kind].items())
        layout = Layout(world=4, etp=2, stage=int(kind[0]), dtype="bf16", with_block=with_block, extra=extra)
        found.append(errors(_run(launcher, Pipeline(layout, cuts=(3,)), recipe), train_unsharded(recipe)))
    got, allowed = found
    for what in ("loss", "norm", "weight"):
        limit = FACTOR * max(allowed[what], 2**-8 if what != "weight" else 0.0)
        assert got[what] <= limit, f"{what} is off by {got[what]:.1e}; without the block by {allowed[what]:.1e}"
