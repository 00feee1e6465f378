"""Trainer and asynchronous saves (transformers 5.0 to 5.24).

Trainer takes a checkpoint for complete when `save_checkpoint` returns. What it does with checkpoints then has to wait:

- `save_total_limit` deletes older ones. Trainer still chooses which, and training goes on; they are deleted once the
  newer checkpoint is complete, and never where it could not be written.
- With a limit of 1 the end of `train()` deletes all but the best one: it waits first.
- An upload of the checkpoint's folder to the hub waits.
- `train()` returns when its last checkpoint is complete, and raises where it couldn't be written.

Can go when Trainer knows of checkpoints that are still being written.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ds_etp.checkpoint.api import wait_for_save
from ds_etp.checkpoint.async_save import PendingSave, pending_saves
from ds_etp.config.deepspeed import BLOCK
from ds_etp.errors import config_error
from ds_etp.patches.base import MethodPatch, swapped

# Whether this thread is in a rotation that only chooses.
_choosing: ContextVar[bool] = ContextVar("choosing", default=False)


def install_trainer_saves() -> None:
    """Lets Trainer wait for asynchronous saves. Does nothing where it isn't in use.

    The patches stay when ds_etp is unregistered; they do nothing for runs without such saves.

    Raises:
        ConfigError: this transformers deletes old checkpoints in a function that isn't known.
    """
    host = sys.modules.get("transformers.trainer")
    if host is None:
        return
    MethodPatch(host.Trainer, "train", _with_wait_after).apply()
    MethodPatch(host.Trainer, "_push_from_checkpoint", _with_wait_before_upload).apply()
    if hasattr(host, "rotate_checkpoints"):
        MethodPatch(host, "rotate_checkpoints", _deleting_later).apply()
        MethodPatch(host, "sort_checkpoints", _with_wait_before_list).apply()
    elif hasattr(host.Trainer, "_rotate_checkpoints"):  # as in 5.0
        MethodPatch(host.Trainer, "_rotate_checkpoints", _deleting_later).apply()
        MethodPatch(host.Trainer, "_sorted_checkpoints", _with_wait_before_list).apply()
    else:
        raise config_error(f"{BLOCK}.async_save", True, "is not supported with this release of Trainer", works="false")


def _with_wait_after(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if getattr(self, "deepspeed", None) is not None:
            wait_for_save(self.deepspeed)
        return result

    return train


def _with_wait_before_upload(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def push(self: Any, checkpoint_folder: str) -> Any:
        if self.args.hub_strategy in ("checkpoint", "all_checkpoints"):
            _join(pending_saves(Path(checkpoint_folder)))
        return original(self, checkpoint_folder)

    return push


def _with_wait_before_list(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sort_checkpoints(*args: Any, **kwargs: Any) -> Any:
        if not _choosing.get():
            _join(_saves_of(original, args, kwargs))
        return original(*args, **kwargs)

    return sort_checkpoints


def _deleting_later(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rotate_checkpoints(*args: Any, **kwargs: Any) -> Any:
        pending = _saves_of(original, args, kwargs)
        if not pending:
            return original(*args, **kwargs)
        chosen: list[Any] = []
        recorder = cast(Any, SimpleNamespace(rmtree=lambda path, **_: chosen.append(path)))
        token = _choosing.set(True)
        try:
            with swapped(sys.modules[original.__module__], "shutil", lambda _: recorder):
                result = original(*args, **kwargs)
        finally:
            _choosing.reset(token)
        _after_all(pending, functools.partial(_delete, chosen))
        return result

    return rotate_checkpoints


def _delete(folders: Sequence[Any]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _after_all(pending: Sequence[PendingSave], action: Callable[[], None]) -> None:
    if pending:
        pending[0].after_commit(lambda: _after_all(pending[1:], action))
    else:
        action()


def _join(pending: Sequence[PendingSave]) -> None:
    """On rank 0 until they are complete; elsewhere until this rank's part is. No collective: hosts call it on one."""
    for save in pending:
        save.join()


def _saves_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PendingSave]:
    """Those in the directory whose checkpoints a function of the host is about."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    directory = bound.arguments.get("output_dir")
    return [] if directory is None else pending_saves(Path(directory))
