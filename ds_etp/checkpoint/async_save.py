"""Asynchronous saves: training goes on while host copies are written.

The writer threads of the ranks agree through files, never through collectives: these could meet those that the training
thread makes on the same groups. Each rank writes its chunks and then, once they are durable, a marker with their size
and hash, or with the reason why it failed. Rank 0's thread waits for all markers, and commits: only then is the tag
there. Markers go with the commit; where there is none, rank 0 leaves a note. So that a process that ends, or is killed,
at any moment leaves either the whole checkpoint or what an unfinished save leaves.

The training thread learns how it went in `wait`, which is collective, or alone, in `PendingSave.join_committed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from ds_etp.checkpoint.commit import Commit
from ds_etp.checkpoint.folder import FileNames, remove
from ds_etp.checkpoint.write_queue import WriteQueue
from ds_etp.checkpoint.writer import FileMetadata, TensorFile, write_durably
from ds_etp.errors import CheckpointError
from ds_etp.log import logger
from ds_etp.parallel.consensus import broadcast_object, raise_on_all_ranks, reason_of

# How long a rank waits for others whose files don't grow any more: they are dead, or their disk is.
STALL_SECONDS = 600.0
_POLL_SECONDS = 0.02, 2.0  # the first interval, and the longest


class _Stopped(Exception):
    """Why a rank stops waiting for others, in words for the user."""


class PendingSave(WriteQueue):
    """A save that is being written, and the thread that does it.

    Args:
        what: what is done, for messages.
        names: the save's files.
        file: to be written here; None where this rank has no chunks to write.
        commit: on rank 0.

    Attributes:
        problem: on rank 0, once the thread has ended: why there is no checkpoint.
    """

    def __init__(self, what: str, names: FileNames, file: TensorFile | None, commit: Commit | None) -> None:
        super().__init__(limit=None)
        self.what, self.names, self.problem = what, names, ""
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._file, self._commit = file, commit
        self._after: list[Callable[[], None]] | None = []
        self._written, self._cancelled = threading.Event(), threading.Event()

    def hand_over(self) -> None:
        """The host copies are made: the thread does the rest."""
        if self._file is not None:
            self.put(0, self._file.finish)
        self.close()

    def at_end(self) -> None:
        """On the thread, when all is written or a write has failed."""
        if self._cancelled.is_set():
            return
        try:
            self._leave_marker()
        except Exception as error:
            self.failure = self.failure or error
        self._written.set()
        if self._rank == 0:
            self._commit_all()
            with self._changed:
                actions, self._after = self._after or [], None
            for action in [] if self.problem else actions:
                action()
        elif self.failure is not None:
            logger().error("%s", self._text(self._rank, reason_of(self.failure)))

    def _text(self, rank: int, reason: str) -> str:
        return f"{self.what} failed on rank {rank}: {reason}"

    def _leave_marker(self) -> None:
        if self.failure is not None:
            if self._file is not None:
                self._file.close()
            # First, so that there is room for the marker if the disk is full.
            remove(self.names.data(self._rank))
            content: object = {"error": reason_of(self.failure)}
        else:
            metadata = self._file.metadata if self._file is not None else None
            content = {"file": None if metadata is None else [metadata.bytes, metadata.sha256]}
        if self._rank != 0:
            write_durably(self.names.written(self._rank), json.dumps(content).encode())

    def _commit_all(self) -> None:
        assert self._commit is not None
        try:
            if self.failure is not None:
                raise self.failure
            files = self._gather_markers()
            files[0] = self._file.metadata if self._file is not None else None
            self._commit.stage(files)
            self._commit.place()
        except _Stopped as stop:
            self.problem = str(stop)
        except Exception as error:
            self.problem = self._text(0, reason_of(error))
        if not self.problem:
            return
        if not self._commit.placed:
            self._commit.discard()
            remove(self.names.data(0))
        if not self._cancelled.is_set():
            logger().error("%s", self.problem)
            # For ranks that wait alone. Without it they find that nothing grows any more.
            with contextlib.suppress(OSError):
                write_durably(self.names.failed, json.dumps([self.problem, self._commit.placed]).encode())

    def _gather_markers(self) -> dict[int, FileMetadata | None]:
        """Waits for those of the other ranks."""
        missing, found = set(range(1, self._world)), {}
        for names in self._listings(lambda: [self.names.data(rank) for rank in missing]):
            for rank in sorted(missing):
                path = self.names.written(rank)
                if path.name not in names:
                    continue
                content = json.loads(path.read_bytes())
                if "error" in content:
                    raise _Stopped(self._text(rank, content["error"]))
                found[rank] = FileMetadata(*content["file"]) if content["file"] is not None else None
                missing.discard(rank)
            if not missing:
                break
        return found

    def _listings(self, growing: Callable[[], Iterable[Path]]) -> Iterator[set[str]]:
        """The names in the folder, again and again.

        Args:
            growing: files of ranks that are waited for.

        Raises:
            _Stopped: none of them has grown for `STALL_SECONDS`, or this rank has been told to stop.
        """
        interval, longest = _POLL_SECONDS
        sizes, since = dict[str, int](), time.monotonic()
        while True:
            yield set(os.listdir(self.names.folder))
            before, sizes = sizes, {path.name: _size(path) for path in growing()}
            if sizes != before:
                since = time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                waited = ", ".join(sorted(sizes)) or str(self.names.folder)
                raise _Stopped(f"{self.what} failed: nothing new in {STALL_SECONDS:.0f} s of {waited}")
            if self._cancelled.wait(interval):
                raise _Stopped(f"{self.what} failed on another rank")
            interval = min(interval * 1.5, longest)

    def join_written(self) -> None:
        """Waits until this rank's file is durable.

        Raises:
            Exception: what kept it from being written.
        """
        self._written.wait()
        if self.failure is not None:
            raise self.failure

    def join_committed(self) -> None:
        """Waits for the whole checkpoint, without a collective.

        Raises:
            CheckpointError: it isn't there; the reason is that of the first rank that failed.
        """
        self.join()
        if self.failure is not None:
            raise CheckpointError(self._text(self._rank, reason_of(self.failure))) from self.failure
        if self._rank != 0:
            self._await_rank_0()
        elif self.problem:
            raise CheckpointError(self.problem)

    def _await_rank_0(self) -> None:
        marker = self.names.written(self._rank).name
        try:
            for names in self._listings(self.names.folder.iterdir):
                if self.names.failed.name in names:
                    problem, placed = json.loads(self.names.failed.read_bytes())
                    if not placed:
                        self.discard()
                    raise CheckpointError(problem)
                if marker not in names:
                    return
        except FileNotFoundError:
            return  # the folder has been rotated away since
        except _Stopped as stop:
            raise CheckpointError(str(stop)) from None

    def after_commit(self, action: Callable[[], None]) -> None:
        """On rank 0: runs an action once the checkpoint is there, on the thread; never where it fails."""
        with self._changed:
            if self._after is not None:
                self._after.append(action)
                return
        if not self.problem:
            action()

    def cancel(self) -> None:
        """Ends the thread as soon as can be, and removes what this rank has written."""
        self._cancelled.set()
        self.stop()
        if self._file is not None:
            self._file.close()
        self.discard()

    def discard(self) -> None:
        """Removes this rank's files of a save that failed."""
        remove(self.names.data(self._rank), self.names.written(self._rank))
        if self._rank == 0 and self._commit is not None:
            self._commit.discard()
            remove(self.names.failed)

    @property
    def placed(self) -> bool:
        """On rank 0, once the thread has ended: whether the checkpoint is there."""
        return self._commit is not None and self._commit.placed


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def wait(pending: PendingSave) -> None:
    """Waits for a pending save. Collective over the world.

    Raises:
        CheckpointError: on every rank, where one of them failed.
    """
    try:
        with raise_on_all_ranks(pending.what):
            pending.join_written()
    except CheckpointError:
        # Rank 0 may still wait for the marker of one that could not write it.
        pending.cancel()
        raise
    # Every marker is there, so that rank 0 has nothing to wait for but its own disk.
    if dist.get_rank() == 0:
        pending.join()
    problem, placed = broadcast_object((pending.problem, pending.placed))
    if problem:
        if not placed:
            pending.discard()
        raise CheckpointError(problem)


def pending_saves(folder: Path) -> list[PendingSave]:
    """The saves in a folder, or one below it, that threads of this process are at."""
    folder = folder.resolve()
    threads = [thread for thread in threading.enumerate() if isinstance(thread, PendingSave)]
    return [save for save in threads if folder in (save.names.folder.resolve(), *save.names.folder.resolve().parents)]
