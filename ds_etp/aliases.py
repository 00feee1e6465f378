"""Old spellings of what users write, for one release. Each works, with a warning that names the new one."""

from __future__ import annotations

import os
import warnings
from typing import Any

PUBLIC_NAMES = {"Cut": "ShardSpec"}
CONFIG_KEYS = {"plan": "dispatcher", "node_weight": "inter_node_cost"}  # of the block
REMOVED_CONFIG_KEYS = {  # of the block, and why nobody misses them
    "equal_batches": "sizes and counts now come in one message",
    "static_shapes": "few rows are never counted, and many would take ep times the memory",
}
DISPATCHER_NAMES = {"alltoall_gather_first": "alltoall_etp_first"}
SPEC_ARGUMENTS = {"parts": "fused_chunks", "width": "interleave", "spare": "has_zero_compute_rows"}
REGISTER_ARGUMENTS = {"cuts": "specs"}  # of `register_layout`
ADAPTER_METHODS = {"on_local_rows": "local_experts_forward"}  # of `ShardedExperts`


def warn_renamed(old: str, new: str) -> None:
    """Says, on the launcher's rank 0, that what a user wrote has a new name."""
    if os.environ.get("RANK", "0") == "0":
        text = f"{old} is now called {new}; the old name goes with the next release"
        warnings.warn(text, FutureWarning, stacklevel=3)


def warn_removed(key: str, reason: str) -> None:
    """Says, on the launcher's rank 0, that what a user wrote has no effect any more."""
    if os.environ.get("RANK", "0") == "0":
        text = f"{key} has no effect any more: {reason}. Leave it out; it will be an error in the next release"
        warnings.warn(text, FutureWarning, stacklevel=4)


def renamed_class(old: str, cls: Any) -> Any:
    """What a public class of another name was: one that takes its arguments under the names they had, too."""

    def make(*args: Any, **kwargs: Any) -> Any:
        warn_renamed(f"ds_etp.{old}", f"ds_etp.{cls.__name__}")
        for name in kwargs.keys() & SPEC_ARGUMENTS.keys():
            warn_renamed(name, SPEC_ARGUMENTS[name])
        return cls(*args, **{SPEC_ARGUMENTS.get(name, name): value for name, value in kwargs.items()})

    return make


def rename_methods(adapter: type) -> None:
    """Puts methods that a user's adapter defines under an old name under the new one."""
    for old, new in ADAPTER_METHODS.items():
        if old in vars(adapter):
            warn_renamed(f"{adapter.__name__}.{old}", new)
            setattr(adapter, new, vars(adapter)[old])


def argument(value: Any, name: str, others: dict[str, Any]) -> Any:
    """An argument of `register_layout`, which may have been given under its old name.

    Raises:
        TypeError: it wasn't given, or something else was.
    """
    for old, given in others.items():
        if REGISTER_ARGUMENTS.get(old) != name or value is not None:
            raise TypeError(f"register_layout() got an unexpected keyword argument {old!r}")
        warn_renamed(old, name)
        value = given
    if value is None:
        raise TypeError(f"register_layout() needs {name!r}")
    return value
