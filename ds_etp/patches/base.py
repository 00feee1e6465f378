"""The ways to change a host: a method of a class until reverted or for a while, or a method of one object."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_OWNER = "__ds_etp_original__"


class MethodPatch:
    """Replaces one method of a host class, or one function of a host module, once, and can put it back.

    Args:
        host: the class or module.
        name: the method's name. The host must define it.
        make: from the original function to the one that takes its place.
    """

    def __init__(self, host: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.host, self.name, self._make = host, name, make

    @property
    def applied(self) -> bool:
        """Whether the host's method is this package's at the moment."""
        return hasattr(vars(self.host).get(self.name), _OWNER)

    def apply(self) -> None:
        """Puts the replacement in place. A second call changes nothing."""
        if self.applied:
            return
        original = _defined(self.host, self.name)
        replacement = self._make(original)
        setattr(replacement, _OWNER, original)
        setattr(self.host, self.name, replacement)

    def revert(self) -> None:
        """Puts the original back, unless someone else has replaced the method since."""
        if self.applied:
            setattr(self.host, self.name, getattr(vars(self.host)[self.name], _OWNER))


@contextmanager
def swapped(host: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a method or function of a host for a while. Unlike a `MethodPatch`, swaps of one function nest.

    Args:
        host: the class or module.
        name: the function's name. The host must define it.
        make: from the function in place to the one that takes its place.
    """
    original = _defined(host, name)
    setattr(host, name, make(original))
    try:
        yield
    finally:
        setattr(host, name, original)


def _defined(host: Any, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = vars(host).get(name)
    if found is None:
        raise RuntimeError(f"{host.__name__} has no method {name}: its release is not one ds_etp knows")
    return found


def override(target: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces one method of one object.

    Args:
        target: the object; its class and its siblings are left alone.
        name: the method's name.
        make: from the bound original to a function without `self`.
    """
    original = getattr(target, name)
    replacement = make(original)
    if isinstance(original, types.MethodType):
        # Callers inspect signatures (HF Trainer does): show them the host's.
        replacement.__wrapped__ = original  # type: ignore[attr-defined]
        replacement.__doc__ = original.__doc__
    setattr(target, name, replacement)
