"""Trainer with accelerate's `ParallelismConfig(sp_size=..., sp_backend="deepspeed")` and split experts.

Two ranks share every sequence. More sequences at a time can't be tried on the CPU: the backward of torch's (2.13)
gather, with which Trainer aggregates the loss, fails for a gloo group that begins after rank 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Launcher
from tests.sequence.runs import CORE, give_attention_back
from tests.sharded import Layout
from tests.trainer.runs import Job, Outcome, run_sharded
from tests.trainer.test_trainer import LIMIT, assert_equal, plain

# One micro batch a step: Trainer takes the mean of their losses when sequences are split, else that of all tokens.
# No auxiliary loss: it would be that of half sequences.
JOB = Job(family="qwen3_moe", micros=1, train=8, positions=True, aux=0.0)


def run(job: Job, layout: Layout, folder: str) -> Outcome | None:
    """Trainer on this rank."""
    from accelerate.parallelism_config import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=CORE)
    axes: Any = ParallelismConfig(sp_size=layout.sp, sp_backend="deepspeed", sp_handler=handler)
    options = (*job.options, ("parallelism_config", axes))
    try:
        return run_sharded(replace(job, options=options), layout, folder)
    finally:
        give_attention_back()


@pytest.mark.parametrize(
    "layout", [Layout(world=2, sp=2, etp=2, stage=2), Layout(world=2, sp=2, ep=2, stage=3)], ids=str
)
def test_trains_like_trainer_alone(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    """Losses, norms, evaluation and weights equal those of a run on whole sequences."""
    result = launcher.run(2, run, timeout=LIMIT, job=JOB, layout=layout, folder=str(tmp_path))[0]
    assert_equal(result, plain(JOB))
