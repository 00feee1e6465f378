"""ms-swift's command line."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.cases import ACCUMULATE, DATA, MODEL, RANKS, SAVED_STEP, STEPS, Job, Trainer

_RATES = {"full": "2e-3", "lora": "1e-2", "dpo": "2e-3"}


def _train(job: Job) -> str:
    command = "rlhf --rlhf_type dpo" if job.method == "dpo" else "sft"
    data = "preferences_messages.jsonl" if job.method == "dpo" else "chats.jsonl"
    tuner = "lora" if job.method == "lora" else "full"
    words = [
        f"NPROC_PER_NODE={RANKS} swift {command} --model {MODEL} --model_type qwen3_moe --template chatml",
        f"--dataset {DATA / data} --tuner_type {tuner} --torch_dtype float32 --fp16 false",
        f"--deepspeed {job.config} --output_dir {job.output} --add_version false",
        f"--per_device_train_batch_size {job.rows} --gradient_accumulation_steps {ACCUMULATE} --num_train_epochs 1",
        f"--learning_rate {_RATES[job.method]} --adam_epsilon 1e-3 --lora_dropout 0",
        f"--logging_steps 1 --save_steps {SAVED_STEP} --report_to none --use_hf true",
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
    final=f"checkpoint-{STEPS}",
    notes=(
        "`--deepspeed` takes a file's path; its names `zero1`, `zero3` and so on are files of its own, without the "
        "block. `--deepspeed_autotp_size 2` sets `tensor_parallel.autotp_size`; here the file has it. "
        "`--torch_dtype float32 --fp16 false` is for the comparison: with float32 alone ms-swift trains in fp16. "
        "With tensor parallelism its supervised trainer multiplies the loss by the number of all ranks, "
        "tensor-parallel ones included (`Seq2SeqTrainer.compute_loss`). ds_etp divides it again, and "
        "refuses other releases there. Instead of `DS_ETP=1`, "
        "`--external_plugins .../ds_etp/integrations/ms_swift.py` registers ds_etp too.",
        "It takes any accelerate. Releases from 1.15 on, at the latest, see processes without a GPU as one each, so "
        'that `"auto"` batch sizes come out wrong with and without ds_etp: on the CPU it is run with 1.11.',
    ),
)
