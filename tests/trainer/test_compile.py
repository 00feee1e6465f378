"""Trainer's `torch_compile=True`: accelerate compiles the engine, and nothing that Trainer logs changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.compiled import OURS, Traced, dynamo
from tests.launcher import Launcher
from tests.sharded import Layout
from tests.trainer.runs import Job, Outcome, run_sharded
from tests.trainer.test_trainer import LIMIT, assert_equal, plain

COMPILED = (("torch_compile", True), ("torch_compile_backend", "eager"), ("eval_strategy", "no"))


def compiled(job: Job, layout: Layout, folder: str) -> tuple[Outcome | None, Traced]:
    """`run_sharded`, with torch.compile on."""
    with dynamo() as traced:
        outcome = run_sharded(job, layout, folder)
    return outcome, traced


def test_equals_trainer_alone(launcher: Launcher, tmp_path: Path) -> None:
    job, layout = Job(train=8, held_out=4), Layout(world=2, etp=2)
    arguments = {"job": replace(job, options=COMPILED), "layout": layout, "folder": str(tmp_path)}
    (result, traced), _ = launcher.run(2, compiled, timeout=LIMIT, **arguments)
    assert traced.graphs > 0
    assert any(OURS in reason for reason in traced.breaks)
    assert_equal(result, plain(job), evaluations=False)  # see there
