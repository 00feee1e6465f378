"""accelerate's `get_state_dict` and `save_state` (1.11 to 1.16) for engines whose experts are split.

`get_state_dict` asks the engine for a consolidated state dict only where it knows of a split, at ZeRO-3 and under
AutoTP. Otherwise it takes the module's own, which holds one rank's experts. A state-dict hook can't put that right:
DeepSpeed calls `state_dict()` on one rank, where no collective may run. Can go when accelerate asks the engine whenever
its experts are split.

`save_state` with a `total_limit` deletes the oldest checkpoint before it makes the next one, though the last may still
be in the hands of an asynchronous save. Can go when accelerate knows of such saves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ds_etp.checkpoint.api import wait_for_save
from ds_etp.checkpoint.export_api import consolidated_state_dict
from ds_etp.patches.base import MethodPatch


def install_get_state_dict() -> None:
    """Lets accelerate write models with split experts. Does nothing where accelerate isn't in use.

    The patch stays when ds_etp is unregistered, since engines made before stay split; it does nothing for others.
    """
    host = sys.modules.get("accelerate")
    if host is not None:
        MethodPatch(host.Accelerator, "get_state_dict", _with_split_experts).apply()


def _with_split_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        split = "ds_etp" in vars(model)
        # Where a user has turned gathering off, the original says so.
        if split and model.zero_gather_16bit_weights_on_model_save():
            return consolidated_state_dict(model)
        return original(self, model, unwrap=unwrap)

    return get_state_dict


def install_save_state() -> None:
    """Lets accelerate wait for an asynchronous save before it deletes older ones. The patch stays, as above."""
    host = sys.modules.get("accelerate")
    if host is not None:
        MethodPatch(host.Accelerator, "save_state", _with_wait_before).apply()


def _with_wait_before(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        for model in self._models:
            wait_for_save(model)
        return original(self, *args, **kwargs)

    return save_state
