"""Text to blocks of tokens, for finetune_mixtral.py.

One process calls `prepare`, which tokenises the text once and caches the result; after that every process calls
`load`. Nothing in here knows about DeepSpeed or about parallelism.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 16  # one block in 16 is kept for evaluation, spread evenly over the text
ENCODE_BATCH = 512  # documents tokenised at a time, so that a large data set never sits in memory as text


@dataclass(frozen=True)
class Corpus:
    """Tokenised text, cut into blocks of `seq_len` tokens."""

    train: np.ndarray  # [blocks, seq_len], int64
    held_out: np.ndarray  # [blocks, seq_len], int64
    vocab_size: int
    description: str


def prepare(
    cache_dir: Path,
    dataset: list[str],
    *,
    tokenizer: str | None = None,
    vocab_size: int = 4096,
    split: str = "train",
    text_column: str = "text",
) -> Path:
    """Tokenise `dataset`, unless the cache has it, and return the folder that holds the result.

    Args:
        cache_dir: where results are kept, one folder for each combination of text and tokenizer.
        dataset: text files, or one dataset id for `datasets.load_dataset`; empty for Python's own documentation.
        tokenizer: id or folder of a pretrained tokenizer. None trains a byte-level BPE on the text itself.
        vocab_size: size of the trained BPE; unused with a pretrained tokenizer.
        split, text_column: which part of a dataset id to read.
    """
    source = _source(dataset, split, text_column)
    key = json.dumps([source, tokenizer or f"bpe-{vocab_size}"])
    folder = cache_dir / f"corpus-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
        # Built aside and then renamed: a run that is stopped half-way leaves no folder that looks complete.
        built = Path(scratch) / "corpus"
        built.mkdir()
        if tokenizer is None:
            tokens, size = _encode_with_new_bpe(source, vocab_size, built / "tokenizer.json")
        else:
            tokens, size = _encode_with_pretrained(source, tokenizer)
        if not len(tokens):
            raise ValueError(f"{source['name']} holds no text")
        np.save(built / "tokens.npy", tokens)
        about = {"vocab_size": size, "description": f"{source['name']}, {len(tokens):,} tokens"}
        (built / "about.json").write_text(json.dumps(about))
        os.rename(built, folder)
    return folder


def load(folder: Path, seq_len: int) -> Corpus:
    """Read what `prepare` left in `folder`, cut into blocks of `seq_len` tokens."""
    about = json.loads((folder / "about.json").read_text())
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    count = len(tokens) // seq_len
    if count < HELD_OUT_EVERY:
        raise ValueError(
            f"the text gives {count} blocks of {seq_len} tokens ({len(tokens)} // {seq_len}); at least "
            f"{HELD_OUT_EVERY} are needed to hold one back for evaluation. Use more text or a smaller --seq_len"
        )
    blocks = np.asarray(tokens[: count * seq_len], dtype=np.int64).reshape(count, seq_len)
    is_held_out = np.arange(count) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Corpus(blocks[~is_held_out], blocks[is_held_out], about["vocab_size"], about["description"])


def _source(dataset: list[str], split: str, text_column: str) -> dict[str, Any]:
    """What identifies the text, and all that `_documents` needs to read it. JSON types only: it is the cache key."""
    if not dataset:
        return {"kind": "pydoc", "name": "Python documentation", "python": platform.python_version()}
    if all(Path(name).is_file() for name in dataset):
        files = [Path(name).resolve() for name in dataset]
        stamps = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return {"kind": "files", "name": ", ".join(file.name for file in files), "files": stamps}
    if len(dataset) > 1:
        missing = [name for name in dataset if not Path(name).is_file()]
        raise FileNotFoundError(f"--dataset: no such file: {', '.join(missing)} (give files, or one dataset id)")
    return {"kind": "hub", "name": dataset[0], "split": split, "text_column": text_column}


def _documents(source: dict[str, Any]) -> Iterator[str]:
    if source["kind"] == "pydoc":
        from pydoc_data.topics import topics

        yield from topics.values()
    elif source["kind"] == "files":
        for name, _, _ in source["files"]:
            yield Path(name).read_text(encoding="utf-8", errors="replace")
    else:
        from datasets import load_dataset

        for row in load_dataset(source["name"], split=source["split"]):
            yield row[source["text_column"]]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, ENCODE_BATCH)):
        yield batch


def _encode_with_new_bpe(source: dict[str, Any], vocab_size: int, save_as: Path) -> tuple[np.ndarray, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_documents(source), trainer)
    tokenizer.save(str(save_as))
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = (
        [*encoding.ids, end]
        for batch in _batches(_documents(source))
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False)
    )
    return _concatenate(encoded), tokenizer.get_vocab_size()


def _encode_with_pretrained(source: dict[str, Any], name: str) -> tuple[np.ndarray, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = (
        [*ids, *end]
        for batch in _batches(_documents(source))
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
    )
    return _concatenate(encoded), len(tokenizer)


def _concatenate(encoded: Iterable[list[int]]) -> np.ndarray:
    arrays = [np.asarray(ids, dtype=np.uint32) for ids in encoded]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.uint32)
