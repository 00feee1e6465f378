"""A script with accelerate's own loop, under `accelerate launch`."""

from __future__ import annotations

from tests.trainers.cases import CONFIGS, DATA, MODEL, Job, Trainer

SCRIPT = "tests/trainers/scripts/accelerate_loop.py"


def _train(job: Job) -> str:
    words = [
        f"accelerate launch --config_file {CONFIGS / 'accelerate.yaml'} --deepspeed_config_file {job.config}",
        f"{SCRIPT} --model {MODEL} --text {DATA / 'text.txt'} --output {job.output}",
    ]
    if job.method == "lora":
        words.append("--lora --rate 1e-2")
    if job.rows > 1:
        words.append(f"--rows {job.rows}")
    if job.resume is not None:
        words.append(f"--resume {job.resume}")
    return " ".join(words)


TRAINER = Trainer(
    name="accelerate",
    title="accelerate",
    packages=("accelerate", "transformers", "peft"),
    train=_train,
    methods=("full", "lora"),
    notes=(
        "A loop of accelerate's own: [accelerate_loop.py](../tests/trainers/scripts/accelerate_loop.py), in which "
        "nothing is said of ds_etp.",
    ),
)
