"""Fine-tune a mixture-of-experts language model with the Hugging Face Trainer.

An ordinary Trainer script that does not import ds_etp. How attention and experts are split is decided by the JSON file
alone; what the file has no value for, Trainer's arguments give:

    deepspeed --num_accelerators 4 --module ds_etp examples/finetune_mixtral_trainer.py --deepspeed configs/demo.json
    deepspeed ... --resume
    deepspeed ... --sp 2

With --sp, that many ranks share each sequence (DeepSpeed's Ulysses), for sequences too long for one of them.
Without --model it trains a small Mixtral from scratch; without --dataset, on the documentation that ships with Python.
The model is written to <output>/model, in the format of the hub: see generate.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import common
import corpus
import deepspeed
import numpy as np
import torch
from accelerate.parallelism_config import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


def parse_args() -> argparse.Namespace:
    parser = common.make_parser(__doc__.splitlines()[0], "runs/finetune_mixtral_trainer")
    parser.add_argument("--sp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--save_every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--eval_blocks", type=int, default=64, help="most held-out sequences to evaluate on")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    return parser.parse_args()


class Blocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens as Trainer wants them. Positions are for ranks that get a part of a block."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = torch.from_numpy(blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[index]
        return {"input_ids": block, "labels": block, "position_ids": torch.arange(len(block))}


def sequence_parallelism(args: argparse.Namespace) -> ParallelismConfig | None:
    if args.sp == 1:
        return None
    deepspeed.init_distributed()  # Ulysses makes its groups first; on the CPU, accelerate leaves this to the engine
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    rest = int(os.environ["WORLD_SIZE"]) // args.sp  # tensor-parallel ranks too: DeepSpeed counts them as data-parallel
    return ParallelismConfig(sp_size=args.sp, sp_backend="deepspeed", sp_handler=handler, dp_shard_size=rest)


def training_arguments(args: argparse.Namespace, config: dict[str, Any]) -> TrainingArguments:
    # Trainer insists that its arguments and the file agree, so what the file says is what they say.
    optimizer = config.get("optimizer", {}).get("params", {})
    betas = optimizer.get("betas", [0.9, 0.95])
    return TrainingArguments(
        output_dir=str(args.output),
        deepspeed=args.deepspeed,
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        per_device_eval_batch_size=config["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=config.get("gradient_accumulation_steps", 1),
        max_grad_norm=config.get("gradient_clipping", 1.0),
        learning_rate=optimizer.get("lr", 2e-3),
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=optimizer.get("eps", 1e-8),
        weight_decay=optimizer.get("weight_decay", 0.1),
        bf16=bool(config.get("bf16", {}).get("enabled")),
        fp16=bool(config.get("fp16", {}).get("enabled")),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": common.FINAL_LR},
        warmup_steps=max(1, round(common.WARM_UP * args.steps)),
        max_steps=args.steps,
        logging_steps=args.log_every,
        save_steps=args.save_every,
        save_total_limit=2,
        seed=args.seed,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        parallelism_config=sequence_parallelism(args),
    )


def main() -> int:
    args = parse_args()
    config = json.loads(Path(args.deepspeed).read_text())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizer's threads would compete with the ranks
    # Before the model: with ZeRO-3, from_pretrained partitions weights while it loads them, once these exist.
    training = training_arguments(args, config)

    with training.main_process_first(desc="tokenising", local=False):
        folder = corpus.prepare(args.cache_dir, args.dataset, **common.corpus_options(args))
    data = corpus.load(folder, args.seq_len)
    if args.model is None:
        file = str(folder / "tokenizer.json")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token=corpus.END_OF_TEXT)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)

    trainer = Trainer(
        model=common.build_model(args, config, data.vocab_size),
        args=training,
        train_dataset=Blocks(data.train),
        eval_dataset=Blocks(data.held_out[: args.eval_blocks]),
        processing_class=tokenizer,
        data_collator=default_data_collator,  # the blocks are of equal length: nothing to pad
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(args.output / "model"))

    start = math.log(data.vocab_size)
    if trainer.is_world_process_zero():
        print(f"data: {data.description}")
        print(f"model: {args.output / 'model'}")
        print(f"evaluation loss {loss:.2f} after {trainer.state.global_step} steps (uniform guessing: {start:.2f})")
    torch.distributed.destroy_process_group()
    return 0 if loss < start else 1


if __name__ == "__main__":
    sys.exit(main())
