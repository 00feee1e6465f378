"""What DeepSpeed does without our block: the reason for the corrections of `ds_etp.patches.deepspeed.ulysses`.

A failure here means that DeepSpeed has changed what the corrections stand on.
"""

from __future__ import annotations

import pytest
import torch

from tests.launcher import Launcher
from tests.oracle import train_unsharded
from tests.sequence.runs import Sequences, train
from tests.sharded import Layout

SP = 2


@pytest.mark.sample("0-2", "3-1")
@pytest.mark.parametrize(("stage", "factor"), [(0, SP), (1, SP), (2, SP), (3, 1)])
def test_gradients_are_sp_times_too_large_but_at_stage_3(launcher: Launcher, stage: int, factor: int) -> None:
    recipe = Sequences(dp=2, steps=1, clip=0.0)
    layout = Layout(world=4, sp=SP, stage=stage, with_block=False)
    run, oracle = launcher.run(4, train, recipe=recipe, layout=layout)[0], train_unsharded(recipe)
    assert run.losses == pytest.approx(oracle.losses, rel=1e-6)
    for name, true in oracle.grads.items():
        # Entries near zero are sums that cancel: measured against the largest.
        torch.testing.assert_close(run.grads[name], factor * true, rtol=0, atol=factor * 1e-5 * true.abs().max().item())
