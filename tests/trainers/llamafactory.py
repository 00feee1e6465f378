"""LLaMA-Factory's command line: a YAML file, with changes to it behind."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.cases import CONFIGS, RANKS, Job, Trainer

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
    return f"llamafactory-cli export {FILES / 'merge.yaml'} adapter_name_or_path={adapter} export_dir={output}"


TRAINER = Trainer(
    name="llamafactory",
    title="LLaMA-Factory",
    packages=("llamafactory", "transformers", "accelerate", "peft", "trl"),
    train=_train,
    merge=_merge,
    notes=(
        "A YAML file ([full](../configs/trainers/llamafactory/full.yaml), "
        "[LoRA](../configs/trainers/llamafactory/lora.yaml), [DPO](../configs/trainers/llamafactory/dpo.yaml)) with "
        "the key `deepspeed`, and changes to it behind. Its extra "
        "`deepspeed` asks for 0.18.4 at most, which is below ds_etp's range; the program itself takes any: install "
        "DeepSpeed 0.19.8 over it. `lora_target: all` is every linear layer, so attention here, not the experts.",
        "It imports torchaudio at its start, whose builds on PyPI need CUDA. With a CPU build of torch, "
        "`.trainers/llamafactory` has torchaudio without its compiled part.",
    ),
)
