"""Experts modules: their layouts, the shards they become, and what is checked of them first."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    # Where adapters of users' own found their base class, for one release.
    if name == "ShardedExperts":
        import_module("ds_etp.aliases").warn_renamed("ds_etp.experts.ShardedExperts", "ds_etp.ShardedExperts")
        return import_module("ds_etp.experts.sharded").ShardedExperts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
