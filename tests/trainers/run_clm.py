"""transformers' own example script run_clm.py, which its release on PyPI doesn't have: from its repository."""

from __future__ import annotations

from tests.trainers.cases import ACCUMULATE, DATA, ENVIRONMENTS, MODEL, RANKS, SAMPLES, SAVED_STEP, Job, Script, Trainer

_COMMIT = "3a275d3581c0ecf962f7412aa764c2047331fd6b"
_PATH = "examples/pytorch/language-modeling/run_clm.py"
SCRIPT = Script(
    url=f"https://raw.githubusercontent.com/huggingface/transformers/{_COMMIT}/{_PATH}",
    sha256="d55f4705f486c6a0b6d2aeb15367129efef1162b84cc60f5cbdb73ec32d4d727",
)


def _train(job: Job) -> str:
    words = [
        f"torchrun --standalone --nproc_per_node {RANKS} {ENVIRONMENTS}/run_clm/{SCRIPT.name}",
        f"--model_name_or_path {MODEL} --train_file {DATA / 'text.txt'} --block_size 64",
        f"--max_train_samples {SAMPLES} --do_train --deepspeed {job.config} --output_dir {job.output}",
        f"--per_device_train_batch_size {job.rows} --gradient_accumulation_steps {ACCUMULATE} --num_train_epochs 1",
        "--learning_rate 2e-3 --adam_epsilon 1e-3",
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
    script=SCRIPT,
    notes=(
        f"[transformers' example](https://github.com/huggingface/transformers/blob/{_COMMIT}/{_PATH}) of a script with "
        "Trainer, unchanged. The release on PyPI doesn't have it: it is downloaded once. "
        "On the CPU it is run with accelerate 1.11, for the same reason as ms-swift.",
    ),
)
