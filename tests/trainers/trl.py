"""TRL's command line, which starts `accelerate launch`: a YAML file, with changes and accelerate's options behind."""

from __future__ import annotations

from tests.trainers.cases import CONFIGS, Job, Trainer

LAUNCH = CONFIGS / "accelerate.yaml"


def _train(job: Job) -> str:
    words = [
        f"trl {'dpo' if job.method == 'dpo' else 'sft'} --config {CONFIGS / 'trl' / job.method}.yaml",
        f"--accelerate_config {LAUNCH} --deepspeed_config_file {job.config} --output_dir {job.output}",
    ]
    if job.rows > 1:
        words.append(f"--per_device_train_batch_size {job.rows}")
    if job.resume is not None:
        words.append(f"--resume_from_checkpoint {job.resume}")
    return " ".join(words)


TRAINER = Trainer(name="trl", title="TRL", packages=("trl", "transformers", "accelerate", "peft"), train=_train)
