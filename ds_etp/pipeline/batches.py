"""Batches and the loss function in the form that DeepSpeed's pipeline engine takes: `(inputs, labels)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_etp.errors import config_error

COLUMNS = ("input_ids", "attention_mask", "position_ids")


def check_names(names: tuple[str, ...]) -> None:
    """Refuses columns that a pipeline can't bring to its layers.

    Raises:
        ConfigError: names those that work.
    """
    if names[:1] != ("input_ids",) or len(set(names)) != len(names) or not set(names) <= set(COLUMNS):
        raise config_error(
            "from_causal_lm.inputs",
            names,
            "must begin with 'input_ids' and name each column once",
            works="input_ids, then attention_mask, position_ids, both or none",
        )


def pipeline_batch(
    batch: Mapping[str, Tensor], inputs: tuple[str, ...] = ("input_ids", "attention_mask")
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A Hugging Face batch as `engine.train_batch` wants it: `(inputs, labels)`.

    Args:
        batch: `input_ids` and `labels`, both int64 `[B, S]`, and the other columns of `inputs`. A missing
            `attention_mask` is taken to be all ones.
        inputs: what `from_causal_lm` was given.

    Raises:
        KeyError: a column is missing.
    """
    columns = dict(batch)
    if "attention_mask" not in columns:
        columns["attention_mask"] = torch.ones_like(columns["input_ids"])
    missing = [name for name in (*inputs, "labels") if name not in columns]
    if missing:
        raise KeyError(f"the batch has no {', '.join(missing)}; it has {', '.join(batch)}")
    # Masks of bool are sent between stages, which NCCL doesn't do.
    return tuple(columns[name].long() for name in inputs), columns["labels"]


class CausalLoss:
    """The family's own loss: of next-token predictions, the mean over the labels of a micro batch that aren't -100,
    and `router_weight` times the routers' auxiliary loss.

    `engine.train_batch` averages it over micro batches and data-parallel ranks, however many labels each has.
    """

    def __init__(self, model: Any) -> None:
        self._function: Callable[..., Tensor] = model.loss_function
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self.router_weight = 0.0

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """The loss of logits `[B, S, V]`, or of these and the routers' loss, and of labels `[B, S]`."""
        logits, *routers = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = self._function(logits=logits, labels=labels, vocab_size=self._vocabulary)
        return loss + self.router_weight * routers[0] if routers else loss
