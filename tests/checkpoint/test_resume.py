"""Same layout: the resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import RECIPE, Steps, resume
from tests.launcher import Launcher
from tests.sharded import Layout

OFFLOAD = (("zero_optimization", {"offload_optimizer": {"device": "cpu"}}),)
FP32_ACCUMULATION = (("data_types", {"grad_accum_dtype": "fp32"}),)
CASES = {
    **{f"fp32-{stage}": Layout(4, 2, 2, 1, stage=stage) for stage in (0, 1, 2, 3)},
    **{f"fp32-etp4-{stage}": Layout(4, 1, 4, 1, stage=stage) for stage in (1, 3)},
    **{f"bf16-{stage}": Layout(4, 2, 1, 2, stage=stage, dtype="bf16") for stage in (0, 1, 2, 3)},
    "bf16-fp32-accumulation": Layout(4, 2, 2, 1, stage=1, dtype="bf16", extra=FP32_ACCUMULATION),
    "offload-1": Layout(4, 2, 2, 1, stage=1, extra=OFFLOAD),
    "offload-3": Layout(4, 2, 2, 1, stage=3, extra=OFFLOAD),
}


@pytest.mark.sample("fp32-etp4-1", "bf16-2", "offload-3")
@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit(launcher: Launcher, tmp_path: Path, name: str) -> None:
    for whole, resumed in launcher.run(4, resume, recipe=RECIPE, layout=CASES[name], folder=str(tmp_path)):
        assert_identical(whole, resumed)


def assert_identical(whole: Steps, resumed: Steps) -> None:
    """Losses, norms and every weight."""
    assert resumed.losses == whole.losses
    assert resumed.norms == whole.norms
    for name, tensor in whole.tensors.items():
        assert torch.equal(resumed.tensors[name], tensor), name
