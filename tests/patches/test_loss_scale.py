"""ms-swift's supervised trainer under AutoTP is refused where it scales its loss by all ranks.

ms-swift itself is run by `make trainers`. Here its arguments' class has its name and module, and transformers' fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import ds_etp
from ds_etp.errors import ConfigError

SPLIT: dict[str, Any] = {"expert_tensor_parallel": {"etp_size": 2}, "tensor_parallel": {"autotp_size": 2}}


class Seq2SeqTrainingArguments(TrainingArguments):
    """As `swift sft` has them."""


Seq2SeqTrainingArguments.__module__ = "swift.trainers.arguments"


def process(folder: Path, kind: type[TrainingArguments], config: dict[str, Any], average: bool) -> None:
    """What Trainer does with its arguments and the DeepSpeed config."""
    ds_etp.register()
    args = kind(output_dir=str(folder), average_tokens_across_devices=average, use_cpu=True)
    HfTrainerDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config}).trainer_config_process(args)


def test_it_is_refused(tmp_path: Path) -> None:
    known = r"average_tokens_across_devices=True multiplies .* by tensor_parallel\.autotp_size=2 in ms-swift"
    with pytest.raises(ConfigError, match=known) as info:
        process(tmp_path, Seq2SeqTrainingArguments, SPLIT, average=True)
    assert "Values that work: --average_tokens_across_devices false." in str(info.value)


@pytest.mark.parametrize(
    ("kind", "changes", "average"),
    [
        (Seq2SeqTrainingArguments, {}, False),
        (Seq2SeqTrainingArguments, {"tensor_parallel": {"autotp_size": 1}}, True),
        (Seq2SeqTrainingArguments, {"expert_tensor_parallel": {"enabled": False}}, True),
        (TrainingArguments, {}, True),
    ],
    ids=["without the option", "without tensor parallelism", "without the block", "transformers' trainer"],
)
def test_others_are_not(tmp_path: Path, kind: type[TrainingArguments], changes: dict[str, Any], average: bool) -> None:
    process(tmp_path, kind, SPLIT | changes, average)
