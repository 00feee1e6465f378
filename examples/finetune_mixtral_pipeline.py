"""Fine-tune a mixture-of-experts language model whose layers are spread over pipeline stages.

Each stage holds some of the layers, and inside a stage the experts are split as the JSON file says:

    deepspeed --num_accelerators 4 --module ds_etp examples/finetune_mixtral_pipeline.py \\
        --deepspeed configs/pipeline.json
    deepspeed ... --resume

A checkpoint can be resumed with another number of stages, and `ds-etp export` takes the model out of it.
Without --model it trains a small Mixtral from scratch; without --dataset, on the documentation that ships with Python.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import corpus
import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
from finetune_mixtral import load_corpus, schedule, training_batches
from tqdm import tqdm

import ds_etp

# The blocks of text are of equal length: nothing to pad, so no attention mask.
INPUTS = ("input_ids",)
Batches = Iterator[dict[str, torch.Tensor]]


def parse_args() -> argparse.Namespace:
    parser = common.make_parser(__doc__.splitlines()[0], "runs/finetune_mixtral_pipeline")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--save_every", type=int, default=50, help="steps between checkpoints; the last is saved too")
    parser.add_argument("--eval_batches", type=int, default=8, help="most evaluation batches on one rank")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    return parser.parse_args()


def build_engine(args: argparse.Namespace, config: dict[str, Any], vocab_size: int) -> Any:
    model = common.build_model(args, config, vocab_size)
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"model: {args.model or 'small Mixtral'}, {count / 1e6:.1f} million parameters", flush=True)
    module = ds_etp.pipeline.from_causal_lm(model, args.stages, inputs=INPUTS, dynamic_shape=False)
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
        config=config,
        lr_scheduler=None if "scheduler" in config else schedule(args.steps),
    )
    engine.set_batch_fn(partial(ds_etp.pipeline.pipeline_batch, inputs=INPUTS))
    return engine


def as_dicts(blocks: Iterator[torch.Tensor]) -> Batches:
    for block in blocks:
        yield {"input_ids": block, "labels": block}  # the loss shifts the labels itself


def evaluate(engine: Any, blocks: np.ndarray, limit: int) -> float:
    """Mean loss on the held-out blocks, with the routers' auxiliary loss, as in training."""
    size, grid = engine.train_micro_batch_size_per_gpu(), engine.grid
    dp_rank, dp_size = grid.get_data_parallel_id(), grid.get_data_parallel_world_size()
    count = min(len(blocks) // (dp_size * size), limit)
    if count == 0:
        raise ValueError(f"{len(blocks)} held-out blocks are too few for {dp_size} data-parallel ranks")
    mine = torch.from_numpy(blocks[dp_rank : count * size * dp_size : dp_size])
    return float(engine.eval_batch(as_dicts(iter(mine.split(size))), num_micro_batches=count))


def train(engine: Any, batches: Batches, args: argparse.Namespace) -> list[float]:
    """Run the steps that are left, save checkpoints, and return each step's loss, averaged over the ranks."""
    first = engine.global_steps
    losses = torch.zeros(args.steps - first, device=engine.device)
    bar = tqdm(
        total=args.steps, initial=first, disable=dist.get_rank() != 0, desc="training", unit="step", dynamic_ncols=True
    )
    started, last = time.perf_counter(), first
    for done in range(first + 1, args.steps + 1):
        losses[done - first - 1] = engine.train_batch(batches)
        if done % args.log_every == 0 or done == args.steps:
            # Reading a value waits for the device, so it is done only here.
            norm = engine.get_global_grad_norm()
            text = {"loss": f"{losses[done - first - 1].item():.3f}"}
            text["grad norm"] = "?" if norm is None else f"{float(norm):.3f}"
            now = time.perf_counter()
            text["tokens/s"] = f"{(done - last) * engine.train_batch_size() * args.seq_len / (now - started):,.0f}"
            started, last = now, done
            bar.set_postfix(text, refresh=False)
            bar.update(done - bar.n)
        if done % args.save_every == 0 or done == args.steps:
            engine.save_checkpoint(str(args.output))
    bar.close()
    return losses.tolist()


def main() -> int:
    args = parse_args()
    config = json.loads(Path(args.deepspeed).read_text())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizer's threads would compete with the ranks
    deepspeed.init_distributed()
    data = load_corpus(args)
    engine = build_engine(args, config, data.vocab_size)
    if dist.get_rank() == 0:
        print(f"data: {data.description}, 1 part in {corpus.HELD_OUT_EVERY} held out for evaluation", flush=True)
    if args.resume:
        engine.load_checkpoint(str(args.output))
    grid, size = engine.grid, engine.train_micro_batch_size_per_gpu()
    blocks = training_batches(
        data.train,
        size,
        grid.get_data_parallel_id(),
        grid.get_data_parallel_world_size(),
        args.seed,
        pin_memory=engine.device.type == "cuda",
    )
    for _ in range(engine.global_steps * engine.gradient_accumulation_steps()):
        next(blocks)  # these, the run before has seen

    before = evaluate(engine, data.held_out, args.eval_batches)
    losses = train(engine, as_dicts(blocks), args)
    after = evaluate(engine, data.held_out, args.eval_batches)

    return common.conclude(losses, before, after, args.output)


if __name__ == "__main__":
    sys.exit(main())
