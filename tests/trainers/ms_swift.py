"""ms-swift's command line."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.cases import ACCUMULATE, DATA, MODEL, RANKS, SAVED_STEP, Job, Trainer

_RATES = {"full": "2e-3", "lora": "1e-2", "dpo": "2e-3"}


def _train(job: Job) -> str:
    command = "rlhf --rlhf_type dpo" if job.method == "dpo" else "sft"
    data = "preferences_messages.jsonl" if job.method == "dpo" else "chats.jsonl"
    tuner = "lora" if job.method == "lora" else "full"
    words = [
        f"NPROC_PER_NODE={RANKS} swift {command} --model {MODEL} --model_type qwen3_moe --template chatml",
        f"--dataset {DATA / data} --tuner_type {tuner} --torch_dtype float32",
        f"--deepspeed {job.config} --output_dir {job.output} --add_version false",
        f"--per_device_train_batch_size {job.rows} --gradient_accumulation_steps {ACCUMULATE} --num_train_epochs 1",
        f"--learning_rate {_RATES[job.method]} --adam_epsilon 1e-3 --lora_dropout 0",
        f"--logging_steps 1 --save_steps {SAVED_STEP} --report_to none",
    ]
    if job.resume is not None:
        words.append(f"--resume_from_checkpoint {job.resume}")
    return " ".join(words)


def _merge(adapter: Path, output: Path) -> str:
    return f"swift export --adapters {adapter} --merge_lora true --output_dir {output}"


TRAINER = Trainer(
    name="ms_swift",
    title="ms-swift",
    packages=("ms-swift", "transformers", "accelerate", "peft", "trl"),
    train=_train,
    merge=_merge,
    final="checkpoint-4",
)
