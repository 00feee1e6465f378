"""LLaMA-Factory's command line: a YAML file, with changes to it behind."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.cases import CONFIGS, MODEL, RANKS, Job, Trainer

FILES = CONFIGS / "llamafactory"


def _train(job: Job) -> str:
    changes = [f"deepspeed={job.config}", f"output_dir={job.output}"]
    if job.rows > 1:
        changes.append(f"per_device_train_batch_size={job.rows}")
    if job.resume is not None:
        changes.append(f"resume_from_checkpoint={job.resume}")
    launched = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={RANKS} llamafactory-cli train"
    return " ".join([launched, str(FILES / f"{job.method}.yaml"), *changes])


def _merge(adapter: Path, output: Path) -> str:
    return (
        f"llamafactory-cli export model_name_or_path={MODEL} adapter_name_or_path={adapter} "
        f"template=qwen3_nothink export_dir={output}"
    )


TRAINER = Trainer(
    name="llamafactory",
    title="LLaMA-Factory",
    packages=("llamafactory", "transformers", "accelerate", "peft", "trl"),
    train=_train,
    merge=_merge,
)
