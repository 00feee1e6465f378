"""fp16: as close to the fp32 truth as plain DeepSpeed's, within a factor of two; and overflows, which all ranks skip.

The factor, and why every token takes every expert: see `test_bf16`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_etp.errors import ConfigError
from tests.half import fp16_supported
from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.parity.half_runs import Overflow, train_half, train_with_overflow
from tests.parity.test_bf16 import EVERY_EXPERT, FACTOR, errors
from tests.sharded import Layout, make_engine

# One rounding, relative: what a loss or a norm may always be off by.
ROUNDING = 2**-11


def fp16(**keys: Any) -> tuple[tuple[str, Any], ...]:
    return (("fp16", {"enabled": True, **keys}),)


def plain(layout: Layout) -> Layout:
    """Data parallel only, on as many batches."""
    return Layout(layout.dp, stage=layout.stage, extra=layout.extra, with_block=False)


def check(launcher: Launcher, layout: Layout) -> None:
    """Losses, norms, gradients and weights of three clipped steps, beside those of plain DeepSpeed."""
    recipe = Recipe(dp=layout.dp, changes=EVERY_EXPERT)
    truth = train_unsharded(recipe)
    got = errors(launcher.run(layout.world, train_half, recipe=recipe, layout=layout)[0], truth)
    allowed = errors(launcher.run(layout.dp, train_half, recipe=recipe, layout=plain(layout))[0], truth)
    for kind, error in got.items():
        limit = FACTOR * max(allowed[kind], ROUNDING if kind in ("loss", "norm") else 0.0)
        assert error <= limit, f"{kind} is off by {error:.1e}; plain fp16 by {allowed[kind]:.1e}"


@pytest.mark.sample("2-(2, 2, 1)", "3-(1, 2, 1)")
@pytest.mark.parametrize("split", [(1, 2, 1), (1, 1, 2), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """Dynamic loss scale."""
    tp, etp, ep = split
    # So that the scale stays where it starts: its changes are the other tests'.
    extra = fp16(initial_scale_power=8)
    check(launcher, Layout(2 * tp, tp=tp, etp=etp, ep=ep, stage=stage, extra=extra))


@pytest.mark.sample("0-1", "2-128")
@pytest.mark.parametrize(("stage", "scale"), [(0, 1), (1, 128), (2, 128), (3, 128)])
def test_static_scale(launcher: Launcher, stage: int, scale: int) -> None:
    """Of 1 at ZeRO 0, where any other is refused: DeepSpeed divides by it there without having multiplied."""
    check(launcher, Layout(4, tp=2, etp=2, stage=stage, extra=fp16(loss_scale=scale)))


@pytest.mark.sample("1-(1, 2, 2)", "3-(1, 2, 1)")
@pytest.mark.parametrize("split", [(1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overflow_of_one_expert(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """An infinite gradient on one rank: all skip that step, halve the scale, keep their weights, and go on alike."""
    tp, etp, ep = split
    world = 4 if split == (1, 2, 2) else 2 * tp
    scaling = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2, "min_loss_scale": 2}
    extra = fp16(**scaling, consecutive_hysteresis=True, auto_cast=True)
    layout = Layout(world, tp=tp, etp=etp, ep=ep, stage=stage, extra=extra)
    recipe = Recipe(dp=layout.dp, steps=5, changes=EVERY_EXPERT)
    case = {"recipe": recipe, "step_of": 1}
    runs: list[Overflow] = launcher.run(world, train_with_overflow, layout=layout, rank_of=world - 1, **case)
    oracle: Overflow = launcher.run(layout.dp, train_with_overflow, layout=plain(layout), rank_of=0, **case)[0]
    assert oracle.skipped == [0, 1, 1, 1, 1]
    assert oracle.scales == [256, 128, 128, 128, 256]  # it grows again after two good steps in a row
    for run in runs:
        assert (run.skipped, run.scales) == (oracle.skipped, oracle.scales)
        assert run.moved == [True, False, True, True, True]
        # A mean of 22 numbers, each of them rounded.
        assert run.losses == pytest.approx(oracle.losses, rel=ROUNDING)
    start = dict(recipe.model().named_parameters())
    for name, reference in oracle.weights.items():
        moved = (reference - start[name].detach()).norm()
        # Gradients of four steps, each off by roundings of the activations: 1 to 2%, as between two runs of plain fp16.
        assert (runs[0].weights[name] - reference).norm() <= 0.02 * moved, name
    assert torch.isfinite(torch.stack([tensor.norm() for tensor in runs[0].weights.values()])).all()


@fp16_supported()
def refusal() -> str:
    """What an engine at ZeRO 0 says to a loss scale."""
    with pytest.raises(ConfigError) as info:
        make_engine(Recipe(), Layout(2, etp=2, stage=0, extra=fp16()))
    return str(info.value)


def test_no_loss_scale_at_zero_0(launcher: Launcher) -> None:
    for text in launcher.run(2, refusal):
        assert text.startswith("fp16.enabled=True does not train at ZeRO stage 0"), text


@fp16_supported()
def loss_scale_is_applied() -> bool:
    """Whether DeepSpeed's own engine at ZeRO 0 multiplies a loss by the scale before backward."""
    grads = []
    for scale in (1, 128):
        engine = make_engine(Recipe(), Layout(1, stage=0, extra=fp16(loss_scale=scale), with_block=False))
        engine.backward(Recipe().compute_loss(engine, Recipe().batch(0, 0, 0)))
        grads.append(engine.module.lm_head.weight.grad.float().norm().item())
        engine.destroy()
    return grads[1] > 2 * grads[0]


def test_the_fault_at_zero_0_is_deepspeeds(launcher: Launcher) -> None:
    """The refusal can go when this fails."""
    assert not launcher.run(1, loss_scale_is_applied)[0]
