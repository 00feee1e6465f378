"""The ways to change a host: a method of a class until reverted or for a while, or a method of one object."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MARK = "__ds_etp_patch__"


class _Applied:
    """What a replacement carries.

    Attributes:
        replacement: itself. `functools.wraps` copies attributes to the wrapper of another library, which isn't ours.
        original: what it took the place of.
        active: whether it does anything; otherwise it calls the original.
    """

    def __init__(self, original: Any, made: Callable[..., Any]) -> None:
        self.original, self.active = original, True

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (made if self.active else original)(*args, **kwargs)

        self.replacement = replacement
        setattr(replacement, _MARK, self)


def _own(function: Any) -> Any:
    """The `_Applied` of a replacement; None for any other function, also one that wraps a replacement.

    Not asked for its class: another copy of this package in the process (an editable one and another) has its own.
    """
    applied = getattr(function, _MARK, None)
    return applied if applied is not None and applied.replacement is function else None


class MethodPatch:
    """Replaces one method of a host class, or one function of a host module, once, and can put it back.

    Args:
        host: the class or module.
        name: the method's name. The host must define it.
        make: from the original function to the one that takes its place.
    """

    def __init__(self, host: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.host, self.name, self._make = host, name, make
        self._last: _Applied | None = None

    @property
    def applied(self) -> bool:
        """Whether a replacement of this package's acts at the moment, as the host's method or below wrappers of it."""
        found = self._found()
        return found is not None and bool(found.active)

    def _found(self) -> Any:
        """The replacement on the host, or the one that wrappers of other libraries say they are around."""
        function = vars(self.host).get(self.name)
        while function is not None:
            applied = _own(function)
            if applied is not None:
                return applied
            function = getattr(function, "__wrapped__", None)
        return None

    def apply(self) -> None:
        """Puts the replacement in place, or wakes the one that is there. A second call changes nothing."""
        found = self._found()
        if found is not None:
            found.active = True
            return
        original = _defined(self.host, self.name)
        if self._last is not None:
            self._last.active = False  # it may be below a wrapper that hides it: only the new one acts
        self._last = _Applied(original, self._make(original))
        setattr(self.host, self.name, self._last.replacement)

    def revert(self) -> None:
        """Puts the original back. Where someone else has wrapped the method since, theirs stays, and ours sleeps."""
        for applied in (self._found(), self._last):
            if applied is not None:
                applied.active = False
        own = _own(vars(self.host).get(self.name))
        if own is not None:
            setattr(self.host, self.name, own.original)


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
