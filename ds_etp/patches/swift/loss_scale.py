"""ms-swift's supervised trainer under AutoTP (4.6.0): its loss is as many times too large as a group has ranks.

A step's tokens are counted once for a tensor-parallel group, as transformers' Trainer does it, and then the loss is
multiplied by the number of all ranks (`Seq2SeqTrainer.compute_loss`), where Trainer takes the data-parallel ones.
Gradients are too large with it, which AdamW hides and clipping doesn't. Here the loss is divided. Can go when ms-swift
asks Trainer for the size of its tensor parallelism; a release may, and so others than the known one are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ds_etp.patches.base import MethodPatch
from ds_etp.patches.signatures import check_signatures
from ds_etp.patches.transformers.trainer_arguments import names_in, tp_of
from ds_etp.patches.versions import check_swift_version

_ARGUMENTS = "Seq2SeqTrainingArguments"  # of `swift sft` and `swift pt`; other trainers take their losses otherwise


def patch_loss_scale(args: Any, tp: int) -> None:
    """Reaches ms-swift's supervised trainer when its arguments meet a config with our block and tensor parallelism.

    Args:
        args: of any trainer.
        tp: ranks that hold the same batch, above 1.

    Raises:
        ConfigError: another ms-swift than the known one.
    """
    if _ARGUMENTS not in names_in("swift", args):
        return
    check_swift_version(tp)
    trainer = import_module("swift.trainers.seq2seq_trainer").Seq2SeqTrainer
    check_signatures("ms-swift")
    MethodPatch(trainer, "compute_loss", _by_data_ranks).apply()


def _by_data_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        result = original(self, model, inputs, return_outputs, num_items_in_batch)
        tp = tp_of(self)
        if tp == 1 or num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return result
        return (result[0] / tp, *result[1:]) if return_outputs else result / tp

    return compute_loss
