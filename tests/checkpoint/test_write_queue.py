"""The writer thread alone: order, the bound on what waits, failures, and the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ds_etp.checkpoint.write_queue import WriteQueue


def test_it_waits_for_room_and_keeps_the_order() -> None:
    """Reader and writer in lock-step, by events: no time is measured."""
    done: list[int] = []
    allowed = threading.Semaphore(0)

    def write(number: int) -> None:
        assert allowed.acquire(timeout=30)
        done.append(number)

    def read() -> None:
        for number in range(3):
            queue.put(4, lambda number=number: write(number))
            put.append(number)
        queue.put(100, lambda: write(3))  # larger than the limit: alone
        put.append(3)

    put: list[int] = []
    with WriteQueue(limit=10) as queue:
        reader = threading.Thread(target=read)
        reader.start()
        for finished, room_for in ((0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 1, 2, 3])):
            while len(done) < finished or len(put) < len(room_for):
                reader.join(0.005)
            reader.join(0.05)  # time in which it could go too far
            assert done == list(range(finished)) and put == room_for
            allowed.release()
        reader.join(30)
    assert done == [0, 1, 2, 3]


def test_after_a_failure_nothing_is_written_and_nobody_waits() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    queue = WriteQueue(limit=1)
    queue.start()
    queue.put(1, lambda: done.append(1))
    queue.put(1, fail)
    for number in range(2, 50):
        queue.put(1, lambda number=number: done.append(number))  # would block for good on a dead thread
    with pytest.raises(OSError, match="No space left"):
        queue.finish()
    assert done == [1]


def test_the_process_ends_after_the_last_write(tmp_path: Path) -> None:
    """Also where the program ends by an exception."""
    program = (
        "import time; from pathlib import Path; from ds_etp.checkpoint.write_queue import WriteQueue\n"
        "queue = WriteQueue(limit=None); queue.start()\n"
        f"queue.put(1, lambda: (time.sleep(0.3), Path({str(tmp_path / 'written')!r}).touch())); queue.close()\n"
        "raise SystemExit(3)"
    )
    result = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert result.returncode == 3 and (tmp_path / "written").exists()
