"""transformers' own example script run_clm.py, which its release on PyPI doesn't have."""

from __future__ import annotations

from tests.trainers.cases import ACCUMULATE, DATA, MODEL, RANKS, RUNS, SAMPLES, SAVED_STEP, Job, Trainer

SCRIPT = RUNS / "run_clm.py"


def _train(job: Job) -> str:
    words = [
        f"torchrun --nproc_per_node {RANKS} --master_port $MASTER_PORT {SCRIPT} --model_name_or_path {MODEL}",
        f"--train_file {DATA / 'text.txt'} --block_size 64 --max_train_samples {SAMPLES} --do_train",
        f"--deepspeed {job.config} --output_dir {job.output} --per_device_train_batch_size {job.rows}",
        f"--gradient_accumulation_steps {ACCUMULATE} --num_train_epochs 1 --learning_rate 2e-3 --adam_epsilon 1e-3",
        f"--logging_steps 1 --save_steps {SAVED_STEP} --report_to none",
    ]
    if job.resume is not None:
        words.append(f"--resume_from_checkpoint {job.resume}")
    return " ".join(words)


TRAINER = Trainer(
    name="run_clm",
    title="run_clm.py",
    packages=("transformers", "accelerate", "datasets"),
    train=_train,
    methods=("full",),
)
