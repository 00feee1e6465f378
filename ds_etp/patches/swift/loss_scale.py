"""ms-swift's supervised trainer under AutoTP (4.6): its loss is as many times too large as a group has ranks.

With `average_tokens_across_devices`, its default, a step's tokens are counted once for a tensor-parallel group, as
transformers' Trainer does it, and then the loss is multiplied by the number of all ranks (`Seq2SeqTrainer.
compute_loss`), where Trainer takes the data-parallel ones. Gradients are too large with it, which AdamW hides and
clipping doesn't. That is refused; without that option the loss is each rank's own mean, which is right. Can go when
ms-swift asks Trainer for the size of its tensor parallelism.
"""

from __future__ import annotations

from typing import Any

from ds_etp.config.deepspeed import AUTOTP
from ds_etp.errors import config_error
from ds_etp.patches.transformers.trainer_arguments import names_in

_ARGUMENTS = "Seq2SeqTrainingArguments"  # of `swift sft` and `swift pt`; other trainers take their losses otherwise


def check_loss_scale(args: Any, tp: int) -> None:
    """Refuses the option.

    Args:
        args: of any trainer.
        tp: ranks that hold the same batch, above 1.

    Raises:
        ConfigError: it is on, and the trainer is ms-swift's supervised one.
    """
    if _ARGUMENTS in names_in("swift", args) and getattr(args, "average_tokens_across_devices", False):
        raise config_error(
            "average_tokens_across_devices",
            True,
            f"multiplies losses and gradients by {AUTOTP}={tp} in ms-swift, whose trainer counts tensor-parallel ranks "
            "as data-parallel ones",
            works="--average_tokens_across_devices false",
        )
