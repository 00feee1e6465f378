"""Counts calls that make process groups, each of them a call that every rank of the world makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed import distributed_c10d as c10d

# `new_group` and whatever is like it calls the first, once a call, also on ranks that are no members.
_MAKERS = ("_new_process_group_helper", "split_group")


@contextmanager
def count_group_calls() -> Iterator[list[str]]:
    """Lists the `group_desc` of every process group that is asked for, whether this rank is in it or not."""
    calls: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(c10d, name)

        def maker(*args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs.get("group_desc"))
            return original(*args, **kwargs)

        return maker

    with patch.multiple(c10d, **{name: counting(name) for name in _MAKERS}):
        yield calls
