"""transformers' Trainer under AutoTP with `average_tokens_across_devices=False` (5.19 to 5.25): losses are too large.

It divides a rank's own count of tokens by the size of tensor parallelism, which is right for the count of all ranks
alone. Can go when it divides that one only.
"""

from __future__ import annotations

from typing import Any

from ds_etp.config.deepspeed import AUTOTP
from ds_etp.errors import config_error


def check_token_average(args: Any, tp: int) -> None:
    """Refuses the option.

    Args:
        args: of any trainer.
        tp: ranks that hold the same batch, above 1.

    Raises:
        ConfigError: it is off, which is not its default.
    """
    if getattr(args, "average_tokens_across_devices", True) is False:
        raise config_error(
            "average_tokens_across_devices",
            False,
            f"multiplies losses and gradients by {AUTOTP}={tp} in transformers' Trainer, which divides a rank's count "
            "of tokens by it",
            works="true",
        )
