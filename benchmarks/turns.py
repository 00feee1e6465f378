"""Ranks of several launches that run side by side, one launch at a time.

What else a machine does, and how fast it happens to be, changes within seconds. Steps of cases that are to be compared
follow each other step by step then, in processes of their own that wait in between.
"""

from __future__ import annotations

from typing import Any

_pipe: Any = None  # of this rank, to the process that forked it


def referee(pipe: Any) -> None:
    """From now on this rank's turns are given through `pipe`."""
    global _pipe  # noqa: PLW0603 - a rank has one for as long as it lives
    _pipe = pipe


def wait() -> None:
    """Ends this rank's turn, if it has one, and waits for the next. Without a referee it is always one's turn."""
    if _pipe is not None:
        _pipe.send(("waits", None))
        _pipe.recv()
