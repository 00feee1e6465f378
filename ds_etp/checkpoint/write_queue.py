"""A writer thread with a bounded queue, so that tensors are gathered while those before them are written.

Hashing and writing let go of Python's lock. The thread makes no collective: those belong to the thread that trains.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

# Bytes that wait for the writer thread. A single larger tensor waits alone.
QUEUE_BYTES = 512 << 20


class WriteQueue(threading.Thread):
    """Runs writes one after another, in the order they are put in. The process doesn't end before it has.

    After a write that failed the others are dropped: peers are in collectives, so that the one who reads goes on.

    Args:
        limit: bytes that may wait or be in writing; `put` waits for room. None: no limit.

    Attributes:
        failure: of the first write that failed.
    """

    def __init__(self, limit: int | None = QUEUE_BYTES) -> None:
        super().__init__(name="ds_etp-writer", daemon=False)
        self.failure: Exception | None = None
        self._limit, self._bytes = limit, 0
        self._writes: deque[tuple[int, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, nbytes: int, write: Callable[[], object]) -> None:
        """Hands a write over; where the limit is reached, waits until those before it have been written."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._has_room(nbytes))
            if self.failure is None:
                self._writes.append((nbytes, write))
                self._bytes += nbytes
                self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return self._limit is None or self._bytes == 0 or self._bytes + nbytes <= self._limit

    def close(self) -> None:
        """Says that no more writes come: the thread ends after the last one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits for every write.

        Raises:
            Exception: the first one that a write has raised.
        """
        self.close()
        self.join()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Drops what has not been begun, and ends the thread."""
        with self._changed:
            self._writes.clear()
        self.close()
        self.join()

    def run(self) -> None:
        """The thread: the writes, then `at_end`."""
        while self._write_next():
            pass
        self.at_end()

    def at_end(self) -> None:
        """What the thread does after the last write, or after one that failed and `close`."""

    def _write_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._writes) or self._closed)
            if not self._writes:
                return False
            nbytes, write = self._writes.popleft()
        failure: Exception | None = None
        try:
            write()
        except Exception as error:
            failure = error
        del write  # and with it the tensor, before there is room for another
        with self._changed:
            self._bytes -= nbytes
            if failure is not None:
                self.failure = failure
                self._writes.clear()
            self._changed.notify_all()
        return True

    def __enter__(self) -> WriteQueue:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread; what still waits after an exception is dropped."""
        if kind is not None:
            self.stop()
        self.close()
        self.join()
