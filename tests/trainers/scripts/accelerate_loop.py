"""A training loop of accelerate's own, without Trainer, and without a word of ds_etp: `accelerate launch` runs it.

Writes the losses where Trainer writes them, a checkpoint every two steps, and the trained model or adapter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH, EVERY = 64, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="sequences a rank and micro batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--resume", help="a checkpoint's folder")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=8, lora_alpha=16))
    ids = torch.tensor(tokenizer(Path(args.text).read_text())["input_ids"])
    blocks = list(ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH))
    loader = torch.utils.data.DataLoader(blocks, batch_size=args.rows, drop_last=True)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.rate, eps=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    history, losses = [], []
    done = int(args.resume.rpartition("-")[2]) if args.resume else 0
    if args.resume:
        accelerator.load_state(args.resume)
        history = [{"step": step, "loss": float("nan")} for step in range(1, done + 1)]
    batches = accelerator.skip_first_batches(loader, done * args.accumulate)
    for micro, block in enumerate(batches, start=done * args.accumulate + 1):
        with accelerator.accumulate(model):
            loss = model(input_ids=block, labels=block).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if micro % args.accumulate == 0:
            step = len(history) + 1
            history.append({"step": step, "loss": sum(losses) / len(losses)})
            losses = []
            if step % EVERY == 0:
                accelerator.save_state(str(args.output / f"checkpoint-{step}"))
            if step == args.steps:
                break

    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output, state_dict=state)
        (args.output / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
