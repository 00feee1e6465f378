"""Layers to pipeline stages, as DeepSpeed's `PipelineModule` with `partition_method="parameters"` lays them out.

Pure arithmetic, no torch.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import inf


@lru_cache(maxsize=256)
def partition(sizes: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Where stages begin and end: stage s has the layers from the s-th bound to the one after.

    The largest stage less the smallest is as little as it gets. Of equal solutions it is the one that
    `deepspeed.runtime.utils.partition_balanced` (0.19.8) takes.

    Args:
        sizes: parameters of each layer, at least as many layers as stages.
        stages: how many.

    Returns:
        `stages + 1` bounds, from 0 to the number of layers.
    """
    count = len(sizes)
    sums = [0, *accumulate(sizes)]
    largest: list[list[float]] = [[inf] * (stages + 1) for _ in range(count + 1)]
    smallest: list[list[float]] = [[inf] * (stages + 1) for _ in range(count + 1)]
    starts = [[0] * (stages + 1) for _ in range(count + 1)]
    largest[0][0] = 0
    for end in range(1, count + 1):
        for stage in range(1, min(end, stages) + 1):
            best = inf
            # From fewer layers than stages there is no way, and its cost, inf - inf, never wins.
            for start in range(stage - 1, end):
                own = sums[end] - sums[start]
                most = max(largest[start][stage - 1], own)
                cost = most - min(smallest[start][stage - 1], own)
                if best >= cost:
                    best, starts[end][stage] = cost, start
                    largest[end][stage], smallest[end][stage] = most, min(smallest[start][stage - 1], own)
    bounds = [count]
    for stage in range(stages, 0, -1):
        bounds.append(starts[bounds[-1]][stage])
    return tuple(reversed(bounds))
