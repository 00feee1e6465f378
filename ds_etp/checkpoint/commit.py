"""The end of a save, on rank 0: once every rank's file is durable, the index and `latest` are put in place."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ds_etp.checkpoint.folder import FileNames, clean, remove
from ds_etp.checkpoint.format import INDEX, LATEST, Index
from ds_etp.checkpoint.writer import FileMetadata, sync_folder, write_durably, write_temporary
from ds_etp.errors import CheckpointError
from ds_etp.log import logger


@dataclass
class Commit:
    """What makes written files a checkpoint.

    Attributes:
        names: the save's files.
        tag: what `latest` is to say; None leaves it.
        index: the save's, without files.
        state: the content of the state file.
        placed: whether the index is in place, so that the files are needed whatever happens after.
    """

    names: FileNames
    tag: str | None
    index: Index
    state: bytes
    placed: bool = False
    _start: float = field(default_factory=time.monotonic)
    _temporary: Path | None = None

    def stage(self, files: Mapping[int, FileMetadata | None]) -> None:
        """Writes all but the index, and that under a temporary name.

        Args:
            files: by rank; None of a rank that writes no chunks.

        Raises:
            CheckpointError: a file isn't there as this rank sees it.
        """
        folder, state = self.names.folder, self.names.state
        for rank, metadata in sorted(files.items()):
            if metadata is None:
                continue
            path = self.names.data(rank)
            if not path.is_file() or path.stat().st_size != metadata.bytes:
                raise CheckpointError(f"{path} is not there as rank 0 sees it: all ranks need one shared folder")
            self.index.files[path.name] = metadata
        self.index.files[state.name] = write_durably(state, self.state)
        self.index.extra["state_file"] = state.name
        self._temporary = write_temporary(folder / INDEX, self.index.dump())

    def place(self) -> None:
        """Makes the tag visible. Files of an earlier save of it go, and markers of this one."""
        assert self._temporary is not None
        folder = self.names.folder
        os.replace(self._temporary, folder / INDEX)
        self.placed = True
        sync_folder(folder)
        sync_folder(folder.parent)
        if self.tag is not None:
            write_durably(folder.parent / LATEST, self.tag.encode())
        clean(folder, keep={*self.index.files, INDEX})
        total, seconds = sum(entry.bytes for entry in self.index.files.values()), time.monotonic() - self._start
        count = len(self.index.files)
        logger().info("saved %s: %.1f MB in %d files, %.1f s", folder, total / 1e6, count, seconds)

    def discard(self) -> None:
        """Removes what `stage` has written, unless the index is in place."""
        if not self.placed:
            remove(self.names.state, self.names.folder / f"{INDEX}.tmp")
