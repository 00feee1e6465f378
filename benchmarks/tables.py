"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MB = 1e6


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of text."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
