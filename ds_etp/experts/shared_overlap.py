"""Shared-expert overlap: run a decoder block's shared experts while the routed outputs are in flight.

A block of DeepSeek's kind calls `experts(...)`, then `shared_experts(hidden_states)`, and adds the two up. The routed
module runs them early, once its last large collective is in flight; when the block calls them with the same tensor it
gets the cached output, otherwise they run again and a warning is logged once.

Every call of a block goes the same way, as activation checkpointing wants: it matches what a forward keeps by its place
in the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from ds_etp.experts.graph_break import not_compiled


class SharedExpertOverlap:
    """The shared experts of one decoder block, and their cached output.

    Args:
        shared: the module.
        on_unused: called when the block turns out to want something else of them than the cached output.
    """

    def __init__(self, shared: nn.Module, on_unused: Callable[[], None]) -> None:
        self.shared = shared
        self._on_unused = on_unused
        self._block_input: Tensor | None = None  # of the block's call that is running
        self._early: tuple[Tensor, Any] | None = None  # what the shared experts were given early, and their result

    @contextmanager
    def call_of_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """While a block runs: its first argument is what its shared experts will be given."""
        first = next(iter((*args, *kwargs.values())), None)
        self._block_input = first if isinstance(first, Tensor) else None
        try:
            yield
            if self._early is not None:
                self._on_unused()
        finally:
            self._block_input = self._early = None

    @property
    def overlap_fn(self) -> Callable[[], None] | None:
        """What to run while a collective is in flight; None where no block is running."""
        return None if self._block_input is None else self._run_early

    def _run_early(self) -> None:
        given, self._block_input = self._block_input, None
        assert given is not None
        self._early = given, self.shared(given)

    def cached_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether a call of the shared experts has a cached output, and which."""
        early, self._early = self._early, None
        if early is None:
            return False, None
        if not kwargs and len(args) == 1 and args[0] is early[0]:
            return True, early[1]
        self._on_unused()
        return False, None


class _Block:
    """The mixin in front of the class of a block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_etp_shared_overlap.call_of_block(args, kwargs):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _Shared:
    """The mixin in front of the class of shared experts. Hooks run once a forward, with the call that computes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answered, result = self.ds_etp_shared_overlap.cached_output(args, kwargs)  # type: ignore[attr-defined]
        return result if answered else super().__call__(*args, **kwargs)  # type: ignore[misc]


@cache
def _class_with(mixin: type, family: type) -> type:
    """A class that passes for the family's, by its name too: hosts look for blocks by name."""
    names = {name: getattr(family, name) for name in ("__module__", "__qualname__", "__doc__")}
    return not_compiled(type(family.__name__, (mixin, family), names), "shared experts overlap with routed ones")


def install_overlap(block: nn.Module, shared_overlap: SharedExpertOverlap) -> None:
    """Installs the overlap on a decoder block and its shared experts."""
    for module, mixin in ((block, _Block), (shared_overlap.shared, _Shared)):
        module.ds_etp_shared_overlap = shared_overlap  # type: ignore[assignment]
        module.__class__ = _class_with(mixin, type(module))  # type: ignore[arg-type]  # hash of Module
