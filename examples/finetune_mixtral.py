"""Fine-tune a mixture-of-experts language model with DeepSpeed.

This is an ordinary DeepSpeed script and does not import ds_etp. How attention and experts are split is decided by the
JSON file alone:

    deepspeed --num_accelerators 4 --module ds_etp examples/finetune_mixtral.py --deepspeed configs/demo.json

Without --model it trains a small Mixtral from scratch; without --dataset, on the documentation that ships with Python.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import corpus
import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm
from transformers.integrations import HfDeepSpeedConfig


def parse_args() -> argparse.Namespace:
    parser = common.make_parser(__doc__.splitlines()[0], "runs/finetune_mixtral")
    parser.add_argument("--eval_batches", type=int, default=8, help="most evaluation batches on one rank")
    return parser.parse_args()


def load_corpus(args: argparse.Namespace) -> corpus.Corpus:
    """Tokenise on rank 0, read everywhere."""
    options = common.corpus_options(args)
    if dist.get_rank() == 0:
        corpus.prepare(args.cache_dir, args.dataset, **options)
    dist.barrier()
    return corpus.load(corpus.prepare(args.cache_dir, args.dataset, **options), args.seq_len)


def schedule(steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Linear warm-up, then a cosine, as factors on the learning rate of the JSON file."""
    warm_up = max(1, round(common.WARM_UP * steps))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return common.FINAL_LR + (1 - common.FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))

    return lambda optimizer: LambdaLR(optimizer, factor)


def training_batches(
    blocks: np.ndarray, batch_size: int, dp_rank: int, dp_size: int, seed: int, pin_memory: bool
) -> Iterator[torch.Tensor]:
    """Endless batches `[batch_size, seq_len]`; ranks with the same `dp_rank` get the same ones."""
    dataset = TensorDataset(torch.from_numpy(blocks))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, dp_size, dp_rank, seed=seed, drop_last=True)
    loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True, pin_memory=pin_memory)
    if not len(loader):
        raise ValueError(f"{len(blocks)} training blocks are too few for {dp_size} ranks x batch size {batch_size}")
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            yield batch
        epoch += 1


@torch.no_grad()
def evaluate(engine: Any, blocks: np.ndarray, batch_size: int, limit: int, dp_rank: int, dp_size: int) -> float:
    """Mean next-token loss on the held-out blocks, without the router's auxiliary loss.

    Every rank runs the same number of forward passes: experts are shared between ranks, so a rank that ran one more
    would wait for the others for ever.
    """
    per_rank = min(len(blocks) // dp_size, limit * batch_size)
    if per_rank == 0:
        raise ValueError(f"{len(blocks)} held-out blocks are too few for {dp_size} data-parallel ranks")
    mine = torch.from_numpy(blocks[dp_rank : per_rank * dp_size : dp_size])
    engine.eval()
    engine.module.config.output_router_logits = False
    total = torch.zeros((), device=engine.device)
    for batch in mine.split(batch_size):
        inputs = batch.to(engine.device)
        total += engine(input_ids=inputs, labels=inputs).loss.float() * len(batch)
    engine.module.config.output_router_logits = True
    engine.train()
    # Tensor-parallel peers hold equal values, so the mean over all ranks is the mean over data-parallel ranks.
    dist.all_reduce(total)
    return total.item() / (per_rank * dist.get_world_size())


def train(
    engine: Any, batches: Iterator[torch.Tensor], steps: int, log_every: int, tokens_per_step: int
) -> list[float]:
    """Run `steps` optimizer steps and return each one's loss, averaged over the ranks."""
    losses = torch.zeros(steps, device=engine.device)
    bar = tqdm(total=steps, disable=dist.get_rank() != 0, desc="training", unit="step", dynamic_ncols=True)
    started, last = time.perf_counter(), 0
    for step in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            inputs = next(batches).to(engine.device, non_blocking=True)
            loss = engine(input_ids=inputs, labels=inputs).loss  # the model shifts the labels itself
            engine.backward(loss)
            engine.step()
            losses[step] += loss.detach() / engine.gradient_accumulation_steps()
        done = step + 1
        if done % log_every == 0 or done == steps:
            # Reading a value waits for the device, so it is done only here.
            norm = engine.get_global_grad_norm()
            text = {"loss": f"{losses[step].item():.3f}", "grad norm": "?" if norm is None else f"{float(norm):.3f}"}
            now = time.perf_counter()
            text["tokens/s"] = f"{(done - last) * tokens_per_step / (now - started):,.0f}"
            started, last = now, done
            bar.set_postfix(text, refresh=False)
            bar.update(done - bar.n)
    bar.close()
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def main() -> int:
    args = parse_args()
    config = json.loads(Path(args.deepspeed).read_text())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizer's threads would compete with the ranks
    deepspeed.init_distributed()
    rank = dist.get_rank()

    # Tensor-parallel peers must see the same data: `tp` neighbouring ranks are one data-parallel rank.
    tp = int(config.get("tensor_parallel", {}).get("autotp_size", 0)) or 1
    dp_rank, dp_size = rank // tp, dist.get_world_size() // tp

    data = load_corpus(args)
    # With ZeRO-3, from_pretrained partitions weights while it loads them, as long as this object is alive.
    hf_config = HfDeepSpeedConfig(config) if args.model is not None else None
    model = common.build_model(args, config, data.vocab_size)
    if rank == 0:
        count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
        print(f"model: {args.model or 'small Mixtral'}, {count / 1e6:.1f} million parameters")
        print(f"data: {data.description}, 1 part in {corpus.HELD_OUT_EVERY} held out for evaluation", flush=True)

    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=config,
        lr_scheduler=None if "scheduler" in config else schedule(args.steps),
    )
    del hf_config
    batch_size = engine.train_micro_batch_size_per_gpu()
    tokens_per_step = batch_size * engine.gradient_accumulation_steps() * args.seq_len * dp_size
    batches = training_batches(
        data.train, batch_size, dp_rank, dp_size, args.seed, pin_memory=engine.device.type == "cuda"
    )

    before = evaluate(engine, data.held_out, batch_size, args.eval_batches, dp_rank, dp_size)
    losses = train(engine, batches, args.steps, args.log_every, tokens_per_step)
    after = evaluate(engine, data.held_out, batch_size, args.eval_batches, dp_rank, dp_size)

    return common.conclude(losses, before, after, args.output)


if __name__ == "__main__":
    sys.exit(main())
