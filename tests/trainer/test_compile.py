"""Trainer's `torch_compile=True`: accelerate compiles the engine, and nothing that Trainer logs changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ds_etp
from tests.compiled import OURS, QUIET, Traced, dynamo
from tests.launcher import Launcher
from tests.models import make_model
from tests.sharded import Layout, full_tensors, weight
from tests.trainer.runs import Job, Outcome, deepspeed_config, forget_host_state, outcome, run
from tests.trainer.test_trainer import LIMIT, assert_equal

COMPILED = (("torch_compile", True), ("torch_compile_backend", "eager"))


def model() -> Any:
    return make_model("mixtral", **dict(QUIET))


def compiled(job: Job, layout: Layout, folder: str) -> tuple[Outcome, Traced]:
    """Trainer under ds_etp on this rank, with torch.compile on."""
    ds_etp.register()
    try:
        with dynamo() as traced:
            trainer = run(job, Path(folder), layout.dp, deepspeed_config(layout), model())
            result = outcome(trainer)
            result.weights = full_tensors(trainer.deepspeed, weight)
            trainer.deepspeed.destroy()
        return result, traced
    finally:
        forget_host_state()


@pytest.mark.full  # tracing takes ten seconds; what Trainer calls is what tests/parity/test_compile.py calls
def test_equals_trainer_alone(launcher: Launcher, tmp_path: Path) -> None:
    layout = Layout(world=2, etp=2)
    job = Job(train=16, options=(("eval_strategy", "no"),))
    arguments = {"job": replace(job, options=(*job.options, *COMPILED)), "layout": layout, "folder": str(tmp_path)}
    (result, traced), _ = launcher.run(2, compiled, timeout=LIMIT, **arguments)
    assert traced.graphs > 0
    assert any(OURS in reason for reason in traced.breaks)
    try:
        trainer = run(job, tmp_path, model=model())
        alone = outcome(trainer)
        alone.weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    finally:
        forget_host_state()
    assert_equal(result, alone)
