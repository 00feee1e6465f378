"""Losses that trainers multiply by tensor-parallel ranks: ms-swift's are divided, an option of transformers refused.

ms-swift itself is run by `make trainers`: here are its arguments' name and module, with transformers' fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import ds_etp
from ds_etp.engine import is_registered
from ds_etp.errors import ConfigError
from ds_etp.patches import versions

SPLIT: dict[str, Any] = {"expert_tensor_parallel": {"etp_size": 2}, "tensor_parallel": {"autotp_size": 2}}


class Seq2SeqTrainingArguments(TrainingArguments):
    """As `swift sft` has them."""


Seq2SeqTrainingArguments.__module__ = "swift.trainers.arguments"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """For these tests alone: others of this process start unregistered."""
    before = is_registered()
    ds_etp.register()
    yield
    if not before:
        ds_etp.unregister()


def process(folder: Path, kind: type[TrainingArguments], config: dict[str, Any], average: bool = True) -> None:
    """What Trainer does with its arguments and the DeepSpeed config."""
    args = kind(output_dir=str(folder), average_tokens_across_devices=average, use_cpu=True)
    HfTrainerDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config}).trainer_config_process(args)


def test_a_count_of_a_ranks_own_tokens_is_refused(tmp_path: Path) -> None:
    known = r"average_tokens_across_devices=False multiplies .* by tensor_parallel\.autotp_size=2 .* that work: true\."
    with pytest.raises(ConfigError, match=known):
        process(tmp_path, TrainingArguments, SPLIT, average=False)


@pytest.mark.parametrize(
    "changes", [{"tensor_parallel": {"autotp_size": 1}}, {"expert_tensor_parallel": {"enabled": False}}]
)
def test_not_without_tensor_parallelism_and_the_block(tmp_path: Path, changes: dict[str, Any]) -> None:
    process(tmp_path, Seq2SeqTrainingArguments, SPLIT | changes, average=False)


def test_other_trainers_need_no_swift(tmp_path: Path) -> None:
    process(tmp_path, TrainingArguments, SPLIT)


@pytest.mark.parametrize("release", ["4.5.2", "4.7.0", "5.0"])
def test_another_swift_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(versions, "version", lambda name: release)
    known = (
        rf"tensor_parallel\.autotp_size=2 was not tried with ms-swift {release}: .* that work: 1, or ms-swift 4\.6\."
    )
    with pytest.raises(ConfigError, match=known):
        process(tmp_path, Seq2SeqTrainingArguments, SPLIT)
