"""Options that only DeepSpeedCPUAdam has: partial offload, and master weights and states of 16 bits.

For `make test-full`: DeepSpeed compiles this optimizer first, which takes a minute or two, once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import CPUAdamBuilder

from tests.launcher import Launcher
from tests.oracle import ADAM_EPS, Recipe, train_unsharded
from tests.parity.half_runs import train_half
from tests.parity.test_bf16 import EVERY_EXPERT, FACTOR, errors
from tests.sharded import Layout, full_tensors, make_engine, train, weight
from tests.tolerances import assert_equal_runs

ADAM = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": ADAM_EPS, "weight_decay": 0.1}
STATES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """In one process, before many ask for it."""
    CPUAdamBuilder().load()


def offload(stage: int, split: tuple[int, int, int], extra: Any = (), **keys: Any) -> Layout:
    tp, etp, ep = split
    extra = (
        ("optimizer", {"type": "AdamW", "params": ADAM}),
        ("zero_optimization", {"offload_optimizer": {"device": "cpu", **keys}}),
        *extra,
    )
    return Layout(2 * tp, tp=tp, etp=etp, ep=ep, stage=stage, extra=extra)


@pytest.mark.full
@pytest.mark.parametrize("split", [(1, 2, 1), (2, 2, 1)], ids=str)
def test_partial_offload(launcher: Launcher, split: tuple[int, int, int]) -> None:
    """Half of the optimizer's work on the device."""
    recipe = Recipe(dp=2, optimizer="adamw")
    layout = offload(3, split, ratio=0.5)
    assert_equal_runs(launcher.run(layout.world, train, recipe=recipe, layout=layout)[0], train_unsharded(recipe))


@pytest.mark.full
@pytest.mark.parametrize("split", [(1, 2, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "half",
    [
        ("bf16", STATES | {"bf16_optimizer_states": False}),
        ("bf16", STATES),
        ("fp16", {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": 16}),
    ],
    ids=["bf16 masters", "bf16 states", "fp16 masters"],
)
def test_masters_of_16_bits(launcher: Launcher, half: Any, stage: int, split: tuple[int, int, int]) -> None:
    """As far from the truth as plain DeepSpeed, within the factor that `test_bf16` allows."""
    recipe = Recipe(dp=2, optimizer="adamw", changes=EVERY_EXPERT)
    layout = offload(stage, split, (half,))
    plain = Layout(2, stage=stage, with_block=False, extra=layout.extra)
    truth = train_unsharded(recipe)
    got = errors(launcher.run(layout.world, train_half, recipe=recipe, layout=layout)[0], truth)
    allowed = errors(launcher.run(2, train_half, recipe=recipe, layout=plain)[0], truth)
    for kind, error in got.items():
        limit = FACTOR * max(allowed[kind], 2**-8 if kind in ("loss", "norm") else 0.0)
        assert error <= limit, f"{kind} is off by {error:.1e}; plain by {allowed[kind]:.1e}"


def resumed_equals_kept(recipe: Recipe, layout: Layout, folder: str) -> bool:
    """Whether an engine that loads a checkpoint takes the step that the engine which wrote it takes."""
    ends = []
    for load in (False, True):
        engine = make_engine(recipe, layout)
        if load:
            engine.load_checkpoint(folder)
        for step in range(1 if load else 0, 2):
            engine.backward(recipe.compute_loss(engine, recipe.batch(step, 0, dist.get_rank())))
            engine.step()
            if step == 0:
                engine.save_checkpoint(folder)
        ends.append(full_tensors(engine, weight))
        engine.destroy()
    kept, resumed = ends
    return all(torch.equal(kept[name], resumed[name]) for name in kept)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_of_16_bit_states(launcher: Launcher, tmp_path: Path, stage: int) -> None:
    layout = offload(stage, (1, 2, 1), (("bf16", STATES),))
    case = {"recipe": Recipe(dp=2, optimizer="adamw"), "layout": layout, "folder": str(tmp_path)}
    assert all(launcher.run(2, resumed_equals_kept, **case))
