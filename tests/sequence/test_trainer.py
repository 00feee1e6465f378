"""Trainer with accelerate's `ParallelismConfig(sp_size=..., sp_backend="deepspeed")` and split experts.

Trainer (up to 5.24) aggregates the loss with torch's gather. Its backward (torch 2.13) fails for gloo groups other than
the first ranks, so with tp, which spreads these groups, an all-reduce makes the same sum.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer
from transformers.integrations import deepspeed as integration

from ds_etp.patches.versions import has_own_share_loss
from tests.hosts import needs_sequences
from tests.launcher import Launcher
from tests.sequence.runs import CORE, aggregate, give_attention_back
from tests.sharded import Layout
from tests.trainer.runs import Job, Outcome, run_sharded
from tests.trainer.test_trainer import LIMIT, assert_equal, plain

# None before Trainer shares sequences.
deepspeed_sp_compute_loss = getattr(integration, "deepspeed_sp_compute_loss", None)
pytestmark = pytest.mark.skipif(deepspeed_sp_compute_loss is None, reason="this Trainer doesn't share sequences")

# One micro batch a step: Trainer takes the mean of their losses when sequences are split, else that of all tokens.
# No auxiliary loss: it would be that of half sequences.
JOB = Job(family="qwen3_moe", micros=1, train=8, positions=True, aux=0.0)


def reduced_loss(accelerator: Any, model: Any, inputs: dict[str, Any], return_outputs: bool, pc: Any) -> Any:
    """`deepspeed_sp_compute_loss` for every gloo group."""
    outputs = model(**inputs, labels=inputs["shift_labels"])
    loss = aggregate(outputs.loss, inputs["shift_labels"])
    return (loss, outputs) if return_outputs else loss


def run(job: Job, layout: Layout, folder: str) -> Outcome | None:
    """Trainer on this rank."""
    from accelerate.parallelism_config import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=CORE)
    # DeepSpeed's batch arithmetic takes tensor-parallel ranks for data-parallel ones; accelerate's has to agree.
    axes: Any = ParallelismConfig(
        sp_size=layout.sp, sp_backend="deepspeed", sp_handler=handler, dp_shard_size=layout.tp
    )
    options = (*job.options, ("parallelism_config", axes))
    if layout.tp > 1 and not has_own_share_loss():
        transformers.trainer.deepspeed_sp_compute_loss = reduced_loss
    try:
        return run_sharded(replace(job, options=options), layout, folder)
    finally:
        transformers.trainer.deepspeed_sp_compute_loss = deepspeed_sp_compute_loss
        give_attention_back()


LAYOUTS = {
    "zero2": Layout(world=2, sp=2, etp=2, stage=2),
    "zero3": Layout(world=2, sp=2, ep=2, stage=3),
    "zero1 with tp": Layout(world=4, tp=2, sp=2, etp=2, ep=2, stage=1),
}


@pytest.mark.sample("zero3")
@pytest.mark.compat  # what a rank backpropagates of the loss differs between releases of transformers
@needs_sequences
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_trains_like_trainer_alone(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    """Losses, norms, evaluation and weights equal those of a run on whole sequences."""
    result = launcher.run(layout.world, run, timeout=LIMIT, job=JOB, layout=layout, folder=str(tmp_path))[0]
    assert_equal(result, plain(JOB))
