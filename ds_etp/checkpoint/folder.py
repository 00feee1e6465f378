"""Files of a tag's folder: their names, the generation of the next save's, removal of unfinished or earlier saves'."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from ds_etp.checkpoint.format import INDEX, Index
from ds_etp.errors import CheckpointError
from ds_etp.log import logger

_KINDS = r"\.(?:safetensors|pt|written|failed)(?:\.tmp)?"
_OURS = re.compile(rf"(?:rank\d{{5}}|state)(?:\.\d+)?{_KINDS}|index\.json(?:\.tmp)?")
_GENERATION = re.compile(rf"(?:rank\d{{5}}|state)(?:\.(\d+))?{_KINDS}")


@dataclass(frozen=True)
class FileNames:
    """The files of one save of a tag.

    Attributes:
        folder: the tag's.
        generation: the suffix that tells this save's files from those of earlier saves of the tag.
    """

    folder: Path
    generation: str

    def data(self, rank: int) -> Path:
        """A rank's chunks."""
        return self.folder / f"rank{rank:05d}{self.generation}.safetensors"

    @property
    def state(self) -> Path:
        """The lr scheduler's and the client's state."""
        return self.folder / f"state{self.generation}.pt"

    def written(self, rank: int) -> Path:
        """The marker of an asynchronous save: the rank's chunks are durable, or could not be written."""
        return self.folder / f"rank{rank:05d}{self.generation}.written"

    @property
    def failed(self) -> Path:
        """Rank 0's note that an asynchronous save came to nothing, and why."""
        return self.folder / f"state{self.generation}.failed"


def next_generation(folder: Path) -> str:
    """The suffix that no file of an earlier save of this tag has. What such a save left unfinished goes."""
    if (folder / INDEX).exists():
        try:
            clean(folder, keep={*Index.parse(folder / INDEX).files, INDEX})
        except CheckpointError as error:
            logger().warning("%s; this save replaces it", error)
    else:
        left = [entry.name for entry in folder.iterdir() if _OURS.fullmatch(entry.name)]
        if left:
            logger().warning("%s: removing what an unfinished save left there (%d files)", folder, len(left))
            clean(folder, keep=set())
    found = [match.group(1) for entry in folder.iterdir() if (match := _GENERATION.fullmatch(entry.name))]
    return f".{max(int(number or 0) for number in found) + 1}" if found else ""


def clean(folder: Path, keep: set[str]) -> None:
    """Removes the files of this format that are not to be kept. Other files are none of ours."""
    for entry in folder.iterdir():
        if _OURS.fullmatch(entry.name) and entry.name not in keep:
            remove(entry)


def remove(*paths: Path) -> None:
    """Removes files as far as that can be done."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
