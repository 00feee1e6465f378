"""A warning where DeepSpeed meets an `expert_tensor_parallel` block and ds_etp is installed, but not registered.

DeepSpeed (0.18.6 to 0.19.8) ignores blocks it doesn't know: training would run unsplit, and say nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_etp.config.block import parse_block
from ds_etp.config.deepspeed import BLOCK
from ds_etp.log import logger
from ds_etp.patches.base import MethodPatch


def watch_for_block(failure: Exception | None = None) -> None:
    """Has engines look for the block.

    Args:
        failure: why ds_etp could not be registered, which is raised then; None: it was not asked for.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _configure_with_arguments(self: Any, args: Any, mpu: Any) -> Any:
            result = original(self, args, mpu)
            if not _is_registered() and parse_block(self._config._param_dict) is not None:
                if failure is not None:
                    raise failure
                if os.environ.get("RANK", "0") == "0":
                    logger().warning(_SENTENCE)
            return result

        return _configure_with_arguments

    MethodPatch(DeepSpeedEngine, "_configure_with_arguments", make).apply()


_SENTENCE = (
    f"this DeepSpeed config has an {BLOCK!r} block that nobody reads: experts are NOT split. Start the same command "
    "with DS_ETP=1 in its environment (ds-etp run -- COMMAND), or call ds_etp.register() before deepspeed.initialize"
)


def _is_registered() -> bool:
    import sys

    engine = sys.modules.get("ds_etp.engine")
    return engine is not None and engine.is_registered()
