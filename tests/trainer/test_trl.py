"""TRL's SFTTrainer trains and saves. A smoke test: what it computes is Trainer's, which is tested for parity."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import ds_etp
from tests.export.test_live import LIMIT, load
from tests.launcher import Launcher
from tests.models import VOCABULARY, make_model
from tests.sharded import Layout
from tests.trainer.runs import Job, arguments, deepspeed_config, forget_host_state

pytest.importorskip("trl", reason="trl is not among the requirements: pip install trl, then this runs")


def fine_tune(layout: Layout, folder: str) -> list[float]:
    """Two steps on a few lines of text."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    ds_etp.register()
    try:
        words = ["<pad>", "<eos>", "<unk>", *(f"w{place}" for place in range(VOCABULARY - 3))]
        raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
        lines = [" ".join(f"w{(place * step) % 90}" for step in range(1, 9)) for place in range(1, 17)]
        model = make_model("mixtral")
        plain = arguments(Job(), Path(folder), layout.dp, deepspeed_config(layout)).to_dict()
        wanted = ("output_dir", "per_device_train_batch_size", "learning_rate", "use_cpu", "deepspeed", "logging_steps")
        args = SFTConfig(**{name: plain[name] for name in wanted}, max_steps=2, max_length=16, bf16=False, report_to=[])
        trainer = SFTTrainer(
            model=model, args=args, train_dataset=Dataset.from_dict({"text": lines}), processing_class=tokenizer
        )
        trainer.train()
        trainer.save_model(f"{folder}/model")
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        trainer.deepspeed.destroy()
        return losses
    finally:
        forget_host_state()


def test_sft_trainer(launcher: Launcher, tmp_path: Path) -> None:
    losses = launcher.run(2, fine_tune, timeout=LIMIT, layout=Layout(world=2, etp=2), folder=str(tmp_path))[0]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    load(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()
