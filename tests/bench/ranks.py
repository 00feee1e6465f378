"""What ranks of the benchmarks' launches do in tests."""

from __future__ import annotations

import time

import torch.distributed as dist

from benchmarks import turns


def spans(folder: str, steps: int) -> list[tuple[float, float]]:
    """When each turn began and ended."""
    found = []
    for _ in range(steps):
        turns.wait()
        begin = time.monotonic()
        dist.barrier()
        time.sleep(0.05)
        found.append((begin, time.monotonic()))
    return found


def fails(folder: str) -> None:
    """Rank 1 gives up in its second turn; rank 0 waits for it."""
    turns.wait()
    turns.wait()
    if dist.get_rank() == 1:
        raise ValueError("no more")
    dist.barrier()
