"""Every kind of experts layout trains as it does unsharded, under ZeRO and on several splits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, make_engine, train
from tests.tolerances import NORM, TENSOR, assert_equal_runs

KINDS = ["gpt_oss", "aria_text", "nemotron_h", "llama4_text", "longcat_flash"]
# Its router gradients cancel: in one process too, fp32 is 9e-6 of the largest entry away from fp64.
TOLERANCES = {"longcat_flash": 3e-5}
# (tp, etp, ep, stage) on four ranks. `tests/families` has the other stages, and etp 2 with ep and without.
SPLITS = [(1, 4, 1, 3), (1, 1, 2, 2)]


@pytest.mark.full
@pytest.mark.parametrize(("family", "split"), [*itertools.product(KINDS, SPLITS)])
def test_four_ranks(launcher: Launcher, family: str, split: tuple[int, int, int, int]) -> None:
    tp, etp, ep, stage = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    recipe = Recipe(family=family, dp=layout.dp)
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe), tensor=TOLERANCES.get(family, TENSOR))


def bias_gradients(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """Each rank's own gradients of the down projections' biases after one backward, and the norm."""
    engine = make_engine(recipe, layout)
    loss = recipe.compute_loss(engine, recipe.batch(0, 0, dist.get_rank() // layout.tp))
    engine.backward(loss)
    grads = {name: p.grad.clone() for name, p in engine.module.named_parameters() if name.endswith("down_proj_bias")}
    engine.step()
    found = {"grads": grads, "norm": float(engine.get_global_grad_norm())}
    engine.destroy()
    return found


@pytest.mark.sample("split0", "split2")
@pytest.mark.parametrize("split", [(1, 2, 2), (2, 2, 1), (4, 2, 1)])
def test_gpt_oss_bias_counts_once(launcher: Launcher, split: tuple[int, int, int]) -> None:
    """Every etp rank holds the bias of a down projection; rank 0 has all of its gradient, the others none."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=0)
    recipe = Recipe(family="gpt_oss", dp=layout.dp, steps=1)
    truth = train_unsharded(recipe)
    for rank, found in enumerate(launcher.run(4, bias_gradients, recipe=recipe, layout=layout)):
        assert abs(found["norm"] - truth.norms[0]) <= NORM * truth.norms[0]
        assert len(found["grads"]) == 2
        for name, grad in found["grads"].items():
            wanted = truth.grads[name].chunk(ep)[rank // etp % ep]
            if rank % etp:
                assert not grad.any()
            else:
                torch.testing.assert_close(grad, wanted, rtol=0, atol=TENSOR * float(truth.grads[name].abs().max()))
