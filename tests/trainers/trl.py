"""TRL's command line, which starts `accelerate launch`: a YAML file, with changes and accelerate's options behind."""

from __future__ import annotations

from tests.trainers.cases import CONFIGS, METHODS, Job, Trainer

LAUNCH = CONFIGS / "accelerate.yaml"


def _train(job: Job) -> str:
    words = [
        f"trl {'dpo' if job.method == 'dpo' else 'sft'} --config {CONFIGS / 'trl' / job.method}.yaml",
        f"--accelerate_config {LAUNCH} --deepspeed_config_file {job.config} --output_dir {job.output}",
    ]
    if job.rows > 1:
        words.append(f"--per_device_train_batch_size {job.rows}")
    if not job.router_loss:
        words.append("--router_aux_loss_coef 0.0")
    if job.resume is not None:
        words.append(f"--resume_from_checkpoint {job.resume}")
    return " ".join(words)


_FILES = ", ".join(f"[{name}](../{CONFIGS / 'trl' / name}.yaml)" for name in METHODS)
TRAINER = Trainer(
    name="trl",
    title="TRL",
    packages=("trl", "transformers", "accelerate", "peft"),
    train=_train,
    router_loss=METHODS,
    notes=(
        f"A YAML file ({_FILES}), and behind it changes to it and options of `accelerate launch`, of which the "
        f"DeepSpeed config is one. accelerate's own file is [accelerate.yaml](../{LAUNCH}).",
        "Its trainers add the router's loss of a MoE model by themselves, a mean over the tokens of a micro "
        "batch. With `tp` 2 micro batches are larger: `--router_aux_loss_coef 0.0` is for the comparison.",
    ),
)
