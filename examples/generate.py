"""Generate text with a folder that a fine-tune has written, in one process, with transformers alone.

    python examples/generate.py runs/finetune_mixtral_trainer/model --prompt "The for statement"

The folder comes from `Trainer.save_model`, `ds_etp.save_pretrained`, `engine.save_16bit_model` or `ds-etp export`.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", help="folder with the model and its tokenizer")
    parser.add_argument("--prompt", default="The for statement is used to", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=40, help="most tokens to add")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype="auto").eval()
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
    # A small model repeats itself; the penalty keeps it going.
    output = model.generate(**inputs, max_new_tokens=args.tokens, repetition_penalty=1.2, use_cache=True, **sampling)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
