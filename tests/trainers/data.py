"""A small Qwen3-MoE with its own tokenizer, and data sets in the trainers' formats, from Python's documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.trainers.cases import DATA, MODEL, SAMPLES

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 512
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Wider than usual: routers then tell experts apart by more than rounding.
    "initializer_range": 0.1,
}
# ChatML, as the trainers' own templates of Qwen have it.
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(model: Path = MODEL, data: Path = DATA) -> None:
    """Writes both folders, unless they are there. The same everywhere, up to Python's documentation."""
    if not (model / "config.json").exists():
        tokenizer = _make_tokenizer()
        tokenizer.save_pretrained(model)
        _make_model(tokenizer).save_pretrained(model)
        _name_experts_twice(model / "config.json")
    if not (data / "dataset_info.json").exists():
        _write_data(data)


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_topics(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=_TEMPLATE, model_max_length=512
    )


def _make_model(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, **_SIZES
    )
    return Qwen3MoeForCausalLM(config)


def _name_experts_twice(path: Path) -> None:
    """Newer transformers write `num_local_experts`, which older ones don't read: they would take 128."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_experts": _SIZES["num_experts"]}, indent=2, sort_keys=True) + "\n")


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()


def _pairs() -> Iterator[tuple[str, str]]:
    """Questions and answers of different lengths, so that a wrong average of losses shows."""
    sentences = re.compile(r"[A-Z][^.]{30,}\.(?=\s)")
    for text in _topics():
        found = [" ".join(sentence.split()) for sentence in sentences.findall(text)]
        if len(found) >= 2:
            yield found[0][:80], found[1][: 40 + 17 * (len(found) % 7)]


def _write_data(folder: Path) -> None:
    pairs = [pair for pair, _ in zip(_pairs(), range(2 * SAMPLES), strict=False)]
    asked, others = pairs[:SAMPLES], pairs[SAMPLES:]
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in asked
    ]
    preferred = [
        {"prompt": question, "chosen": answer, "rejected": other}
        for (question, answer), (_, other) in zip(asked, others, strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    # Chat messages: ms-swift, TRL, and LLaMA-Factory by the tags below.
    _write_lines(folder / "chats.jsonl", chats)
    # A prompt and two answers: LLaMA-Factory and TRL; the same as messages: ms-swift.
    _write_lines(folder / "preferences.jsonl", preferred)
    swift = [{**chat, "rejected_response": pair["rejected"]} for chat, pair in zip(chats, preferred, strict=True)]
    _write_lines(folder / "preferences_messages.jsonl", swift)
    (folder / "text.txt").write_text("\n".join(f"{question} {answer}" for question, answer in pairs) + "\n")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info = {
        "chats": {
            "file_name": "chats.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": tags,
        },
        "preferences": {
            "file_name": "preferences.jsonl",
            "ranking": True,
            "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n")


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
