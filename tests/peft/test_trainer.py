"""HF Trainer with LoRA adapters: trains, saves, resumes, and writes adapters that PEFT loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor

import ds_etp
from tests.export.test_live import LIMIT
from tests.launcher import Launcher
from tests.models import make_model
from tests.peft.models import BOTH
from tests.peft.test_export import assert_close, logits
from tests.sharded import Layout, full_tensors, weight
from tests.trainer.runs import Job, Outcome, deepspeed_config, forget_host_state, outcome, run

SAVE: tuple[tuple[str, Any], ...] = (("save_strategy", "steps"), ("save_steps", 2), ("eval_strategy", "no"))


def train(job: Job, layout: Layout, folder: str) -> Outcome | None:
    """Trainer under ds_etp on this rank; rank 0 returns what it did."""
    ds_etp.register()
    try:
        trainer = run(job, Path(folder), layout.dp, deepspeed_config(layout), BOTH.model())
        result = outcome(trainer)
        trainer.save_model(f"{folder}/model")
        result.weights = full_tensors(trainer.deepspeed, weight)
        trainer.deepspeed.destroy()
        return result if dist.get_rank() == 0 else None
    finally:
        forget_host_state()


def adapters(folder: Path) -> dict[str, Tensor]:
    """A folder's adapters on the unsharded base."""
    model = PeftModel.from_pretrained(make_model(BOTH.family, BOTH.seed), folder)
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


@pytest.mark.sample("zero3")
@pytest.mark.parametrize("layout", [Layout(4, 2, 2, 1, stage=1), Layout(2, etp=2, stage=3)], ids=["tp2-zero1", "zero3"])
def test_train_save_resume(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    """Trainer saves without the frozen base, and goes on from there bit for bit."""
    arguments = {"timeout": LIMIT, "layout": layout}
    whole = launcher.run(layout.world, train, job=Job(options=SAVE), folder=str(tmp_path / "whole"), **arguments)[0]
    assert len(whole.losses) == 3
    oracle = outcome(trainer := run(Job(options=(("eval_strategy", "no"),)), tmp_path / "plain", model=BOTH.model()))
    for got, wanted in ((whole.losses, oracle.losses), (whole.norms, oracle.norms)):
        assert got == pytest.approx(wanted, rel=2e-6)  # two roundings of fp32, and Trainer logs a mean of means
    for name, parameter in trainer.model.named_parameters():
        assert_close(whole.weights[name], parameter.detach(), name)
    model = PeftModel.from_pretrained(make_model(BOTH.family, BOTH.seed), tmp_path / "whole" / "model").eval()
    assert_close(logits(model), logits(trainer.model.eval()))
    for folder in ("model", "checkpoint-3"):
        for name, tensor in adapters(tmp_path / "whole" / folder).items():
            assert torch.equal(tensor, whole.weights[name]), f"{folder}: {name}"

    stop, go_on = Job(options=SAVE, stop_after=2), Job(options=SAVE, resume=True)
    for job in (stop, go_on):
        resumed = launcher.run(layout.world, train, job=job, folder=str(tmp_path / "parts"), **arguments)[0]
    assert resumed.losses == whole.losses
    assert resumed.norms == whole.norms
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
