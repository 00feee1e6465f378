"""bf16: as close to the fp32 truth as plain DeepSpeed bf16 data parallelism is, within a factor of two.

The factor is for luck: both runs round differently, and a maximum over few entries scatters. Every token takes every
expert: with fewer, rounding decides now and then which one is second best, and a single token that goes elsewhere is
an error of ten percent, in whichever run it happens.
"""

from __future__ import annotations

import pytest
import torch

from tests.hosts import skip_if_refused
from tests.launcher import Launcher
from tests.oracle import Recipe, Run, train_unsharded
from tests.sharded import Layout, train

FACTOR = 2.0
EVERY_EXPERT = (("num_experts_per_tok", 4),)
FP32_ACCUMULATION = (("data_types", {"grad_accum_dtype": "fp32"}),)

FP32_MERGES = (("expert_tensor_parallel", {"reduce_dtype": "fp32"}),)


def errors(run: Run, truth: Run) -> dict[str, float]:
    """The largest error of each kind, relative to the truth (tensors: to their norm)."""

    def tensors(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
        return max(((got[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted)

    def scalars(got: list[float], wanted: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))

    return {
        "loss": scalars(run.losses, truth.losses),
        "norm": scalars(run.norms, truth.norms),
        "gradient": tensors(run.grads, truth.grads),
        "weight": tensors(run.weights, truth.weights),
    }


def assert_as_close_as_plain_bf16(launcher: Launcher, recipe: Recipe, layout: Layout) -> None:
    """Trains sharded in bf16, by plain DeepSpeed in bf16, and unsharded in fp32; compares the errors of the two."""
    others = tuple(item for item in layout.extra if item[0] != "expert_tensor_parallel")
    plain = Layout(world=layout.dp, stage=layout.stage, dtype="bf16", with_block=False, extra=others)
    truth = train_unsharded(recipe)
    got = errors(launcher.run(layout.world, train, recipe=recipe, layout=layout)[0], truth)
    allowed = errors(launcher.run(plain.world, train, recipe=recipe, layout=plain)[0], truth)
    for kind, error in got.items():
        # A scalar can be right by luck in the plain run: one bf16 rounding (2^-8) of the loss is always allowed.
        limit = FACTOR * max(allowed[kind], 2**-8 if kind in ("loss", "norm") else 0.0)
        assert error <= limit, f"{kind} is off by {error:.1e}; plain bf16 by {allowed[kind]:.1e}"


@pytest.mark.sample(3, 5)
@pytest.mark.parametrize(
    ("stage", "extra", "split"),
    [
        (0, (), (1, 2, 2)),
        (0, (), (2, 4, 1)),
        pytest.param(1, (), (2, 4, 1), marks=pytest.mark.compat),
        (1, FP32_ACCUMULATION, (1, 2, 2)),
        pytest.param(2, (), (1, 2, 2), marks=pytest.mark.compat),
        (2, FP32_MERGES, (2, 4, 1)),
        (3, (), (2, 4, 1)),
        (3, (), (1, 2, 2)),
    ],
    ids=str,
)
def test_bf16(
    launcher: Launcher, stage: int, extra: tuple[tuple[str, dict[str, str]], ...], split: tuple[int, int, int]
) -> None:
    """Losses, norms, gradients and weights of four clipped steps."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage, dtype="bf16", extra=extra)
    skip_if_refused(layout)
    assert_as_close_as_plain_bf16(
        launcher, Recipe(dp=layout.dp, optimizer="sgd", steps=4, changes=EVERY_EXPERT), layout
    )
