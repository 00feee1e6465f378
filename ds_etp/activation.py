"""Activation by environment: `DS_ETP=1` registers ds_etp in every process that imports DeepSpeed.

Launchers start processes of their own, which inherit the environment but not what was imported before. An installed
ds_etp.pth, read at every start of an interpreter, puts a finder in place that does nothing until somebody imports
DeepSpeed, and then calls `find_deepspeed`. `python -m ds_etp` and `ds-etp run` set the variable, so that whatever they
start, and whatever that starts, inherits it.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from ds_etp.errors import ConfigError

VARIABLE = "DS_ETP"
_FINDER = "ds_etp"  # what ds_etp.pth calls its class


def is_requested() -> bool:
    """Whether the environment asks for ds_etp."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "yes")


def request() -> None:
    """Asks for ds_etp in this process's children."""
    os.environ[VARIABLE] = "1"


def find_deepspeed() -> ModuleSpec | None:
    """DeepSpeed's spec, from the other finders, with a call of `on_deepspeed_import` after its import."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") != _FINDER]
    spec = find_spec("deepspeed")
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            on_deepspeed_import()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def on_deepspeed_import() -> None:
    """Registers, where that was asked for. Elsewhere, and where it fails, a block that nobody reads is told of.

    An error is kept until DeepSpeed meets the block: most processes that import DeepSpeed have none.
    """
    from ds_etp.patches.deepspeed.unread_block import watch_for_block

    failure: ConfigError | None = None
    if is_requested():
        from ds_etp.engine import register

        try:
            register()
        except ConfigError as error:
            failure = error
    watch_for_block(failure)
