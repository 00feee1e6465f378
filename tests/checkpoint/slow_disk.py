"""A disk that takes its time, fails or kills, and what was read and written when. In worker processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ds_etp.checkpoint import writer
from ds_etp.checkpoint.save_plan import WriteItem

Interval = tuple[float, float]


@dataclass
class Times:
    """When tensors were read and bytes were written, on this rank."""

    reads: list[Interval] = field(default_factory=list)
    writes: list[Interval] = field(default_factory=list)


@contextmanager
def slow_disk(seconds_per_mb: float) -> Iterator[Times]:
    """Real files whose writes take time in proportion to their bytes."""
    times = Times()

    def before(data: Any) -> None:
        time.sleep(len(data) / 1e6 * seconds_per_mb)

    with _writing(before, times):
        yield times


@contextmanager
def held_disk(then: Callable[[], None] | None = None) -> Iterator[threading.Event]:
    """Real files to which writer threads write nothing before the event is set.

    Args:
        then: what happens at each write after that, before it.
    """
    released = threading.Event()

    def before(_: Any) -> None:
        # The file is opened, and its header written, by the thread that trains.
        if threading.current_thread() is not threading.main_thread():
            assert released.wait(60)
            if then is not None:
                then()

    with _writing(before, Times()):
        yield released


@contextmanager
def _writing(before: Callable[[Any], None], times: Times) -> Iterator[None]:
    original = writer.TensorFile._write

    def write(self: Any, data: Any) -> None:
        start = time.monotonic()
        before(data)
        original(self, data)
        times.writes.append((start, time.monotonic()))

    writer.TensorFile._write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        writer.TensorFile._write = original  # type: ignore[method-assign]


def slow_reads(items: list[WriteItem], times: Times, seconds_per_mb: float) -> list[WriteItem]:
    """A save plan whose tensors take time to gather, as over a network."""

    def slowly(item: WriteItem) -> Callable[[], Any]:
        def read() -> Any:
            start = time.monotonic()
            shard = item.read()
            size = 0.0 if shard is None else shard.numel() * shard.element_size() / 1e6
            # All ranks wait for the one that reads.
            time.sleep(size * seconds_per_mb)
            dist.barrier()
            times.reads.append((start, time.monotonic()))
            return shard

        return read

    return [WriteItem(item.metadata, item.chunks, item.writer, slowly(item)) for item in items]


def full() -> None:
    """The disk is full."""
    raise OSError(28, "No space left on device")


def die() -> None:
    """The process is killed: no handler runs, no buffer is flushed."""
    os._exit(9)


def total(intervals: list[Interval]) -> float:
    """Their seconds together."""
    return sum(stop - start for start, stop in intervals)
