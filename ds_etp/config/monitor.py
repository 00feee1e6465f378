"""`monitor_router`: one of DeepSpeed's monitors has to be enabled, and how often they are written to. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ds_etp.config.deepspeed import BLOCK
from ds_etp.errors import config_error

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")  # blocks of deepspeed 0.19.5 to 0.19.8
_STEPS = 100  # where steps_per_print says nothing


def enabled_monitors(ds_config: Mapping[str, object]) -> list[str]:
    """Those of DeepSpeed's monitors that a raw config enables."""
    blocks = {name: ds_config.get(name) for name in MONITORS}
    return [name for name, block in blocks.items() if isinstance(block, Mapping) and block.get("enabled")]


def check_monitor(monitor_router: object, ds_config: Mapping[str, object]) -> None:
    """Refuses to count for nobody.

    Raises:
        ConfigError: no monitor is enabled.
    """
    if monitor_router and not enabled_monitors(ds_config):
        raise config_error(
            f"{BLOCK}.monitor_router",
            monitor_router,
            "writes to DeepSpeed's monitors, and none is enabled",
            label="What works beside it",
            works=" or ".join(f'"{name}": {{"enabled": true}}' for name in MONITORS)
            + ", at the top level of the same config",
        )


def report_interval(monitor_interval: int | str, steps_per_print: float | None) -> int:
    """Steps between two reports: the block's, or for "auto" `steps_per_print`.

    accelerate (1.0 to 1.15) sets that to infinity, whatever the config says; DeepSpeed's default is none.
    """
    if isinstance(monitor_interval, int):
        return monitor_interval
    return int(steps_per_print) if steps_per_print and math.isfinite(steps_per_print) else _STEPS
