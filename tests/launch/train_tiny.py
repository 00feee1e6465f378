"""An ordinary DeepSpeed training script: it doesn't know of ds_etp unless told to with `--register`.

Prints one JSON line on rank 0: losses, and the shape of an expert parameter on that rank.
"""

from __future__ import annotations

import argparse
import json
import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
STEPS = 2


def make_model() -> torch.nn.Module:
    """The same weights in every process."""
    torch.manual_seed(3)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(MixtralConfig(**CONFIG))
    return model


def make_batch(step: int, rank: int) -> torch.Tensor:
    """Token ids of one rank, `[2, 8]`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, CONFIG["vocab_size"], (2, 8), generator=generator)


def main() -> None:
    """Trains for two steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--register", action="store_true")
    parser.add_argument("--fail-on-rank", type=int, default=-1)
    args = parser.parse_args()
    if args.register:
        import ds_etp

        ds_etp.register()

    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=args.deepspeed, dist_init_required=True
    )
    rank, losses = dist.get_rank(), []
    for step in range(STEPS):
        if step == 1 and rank == args.fail_on_rank:
            raise RuntimeError(f"no more data on rank {rank}")
        ids = make_batch(step, rank).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    if rank == 0:
        shape = list(engine.module.model.layers[0].mlp.experts.down_proj.shape)
        # One write: what other ranks log can't land inside the line.
        os.write(1, f"\n{json.dumps({'losses': losses, 'down_proj': shape})}\n".encode())
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
