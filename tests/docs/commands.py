"""The commands that README.md and docs/ show, with what they say is printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """One command of a page.

    Attributes:
        page: the file's name.
        words: the command, split as a shell does; environment variables before it and comments are left out.
        output: the lines shown after it, "..." left out.
    """

    page: str
    words: tuple[str, ...]
    output: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def shown_commands() -> list[Shown]:
    """Every command of every page, in order."""
    return [shown for page in PAGES for block in _BLOCK.findall(page.read_text()) for shown in _of(page.name, block)]


def _of(page: str, block: str) -> Iterator[Shown]:
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *output = part.rstrip("\n").split("\n")
        words = shlex.split(command, comments=True)
        while re.match(r"\w+=", words[0]):
            words.pop(0)
        yield Shown(page, tuple(words), tuple(line for line in output if line.strip() and line != "..."))
