"""Activation by environment: `DS_ETP=1` registers ds_etp in every process that imports DeepSpeed.

Launchers start processes of their own, which inherit the environment but not what was imported before. An installed
ds_etp.pth, read at every start of an interpreter, puts a finder in place that does nothing until somebody imports
DeepSpeed, and then calls `find_deepspeed`. `python -m ds_etp` and `ds-etp run` set the variable, so that whatever they
start, and whatever that starts, inherits it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
    """DeepSpeed's spec, from the other finders, with a call of `on_deepspeed_import` after its import.

    The finder of ds_etp.pth stays until then: `importlib.util.find_spec("deepspeed")`, by which transformers and others
    look whether it is installed, takes a spec that nobody imports.
    """
    return _spec_with_call("deepspeed", None, _is_startup_finder, on_deepspeed_import)


def _is_startup_finder(finder: Any) -> bool:
    return getattr(finder, "__name__", "") == _FINDER


def _spec_with_call(name: str, path: Any, own: Callable[[Any], bool], call: Callable[[], None]) -> ModuleSpec | None:
    """The spec by the finders that are not `own`. After its module's import those are gone, and `call` is called."""
    others = [finder for finder in sys.meta_path if not own(finder)]
    spec = next((found for finder in others if (found := finder.find_spec(name, path)) is not None), None)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path[:] = [finder for finder in sys.meta_path if not own(finder)]
            call()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


class _CallAfterImport:
    """A finder that has a function called after the import of one module, and then is gone."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != self._name:
            return None
        return _spec_with_call(name, path, lambda finder: finder is self, self._call)


def on_deepspeed_import() -> None:
    """Registers, where that was asked for. Elsewhere, and where it fails, a block that nobody reads is told of.

    An error is kept until DeepSpeed meets the block: most processes that import DeepSpeed have none.
    """
    from ds_etp.patches.accelerate import auto_values
    from ds_etp.patches.deepspeed.unread_block import watch_for_block

    failure: ConfigError | None = None
    if is_requested():
        from ds_etp.engine import register

        try:
            register()
        except ConfigError as error:
            failure = error
    watch_for_block(failure)
    call_after_import(auto_values.MODULE, auto_values.keep_block_from_accelerate)


def call_after_import(name: str, call: Callable[[], None]) -> None:
    """Calls a function now if a module is there, else once it has been imported."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _CallAfterImport(name, call))
