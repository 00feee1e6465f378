"""What the examples share: their arguments, the model they train, and what they say in the end."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

WARM_UP = 0.1  # share of the steps in which the learning rate rises
FINAL_LR = 0.1  # the cosine ends at this share of the learning rate
VOCAB_MULTIPLE = 64  # the small model's vocabulary is padded to this, so that embedding and head split evenly


def make_parser(description: str, output: str) -> argparse.ArgumentParser:
    """The arguments that every training example has.

    Args:
        description: shown by --help.
        output: the folder to write to where none is named.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--deepspeed", required=True, metavar="JSON", help="DeepSpeed config file")
    parser.add_argument("--model", help="hub id or local folder; default: a small Mixtral built from its config")
    parser.add_argument(
        "--dataset", nargs="*", default=[], help="text files, or one dataset id; default: Python's documentation"
    )
    parser.add_argument("--dataset_split", default="train", help="split of a dataset id")
    parser.add_argument("--text_column", default="text", help="column of a dataset id that holds the text")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens in one sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log_every", type=int, default=5, help="steps between reports of the loss")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("runs/cache"), help="tokenised text; on a shared disk with several nodes"
    )
    parser.add_argument("--output", type=Path, default=Path(output), help="folder to write to")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser


def corpus_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `corpus.prepare` wants to know of the arguments."""
    return {"tokenizer": args.model, "split": args.dataset_split, "text_column": args.text_column}


def build_model(args: argparse.Namespace, config: dict[str, Any], vocab_size: int) -> Any:
    """Load --model, or build a Mixtral of about 15 million parameters, the same on every rank."""
    torch.manual_seed(args.seed)
    if args.model is None:
        model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
                num_local_experts=8,
                num_experts_per_tok=2,
                max_position_embeddings=args.seq_len,
                router_aux_loss_coef=0.01,
                bos_token_id=None,
                eos_token_id=0,
            )
        )
    else:
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((low[key] for key in low if config.get(key, {}).get("enabled")), torch.float32)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model.config.output_router_logits = True  # adds the router's load-balancing loss to the training loss
    model.config.use_cache = False
    if getattr(model.config, "head_dim", 0) is None:  # Mixtral's is; Ulysses wants a number
        model.config.head_dim = model.config.hidden_size // model.config.num_attention_heads
    return model


def plot(losses: list[float], before: float, after: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training loss")
    axes.plot([0, len(losses)], [before, after], "o", label="evaluation loss")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def conclude(losses: list[float], before: float, after: float, output: Path) -> int:
    """What came of a training: rank 0 draws the loss curve and says how far the loss fell. Returns the exit code."""
    fell = before - after
    if dist.get_rank() == 0:
        curve = output / "loss.png"
        plot(losses, before, after, curve)
        print(f"loss curve: {curve}")
        verdict = f"fell by {fell:.2f}" if fell > 0 else "did NOT fall"
        print(f"evaluation loss {before:.2f} -> {after:.2f} ({verdict})", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if fell > 0 else 1
