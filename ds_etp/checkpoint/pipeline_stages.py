"""What the pipeline stages hold together: each stage's tensors gathered, and their union by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch.distributed as dist

from ds_etp.parallel.consensus import all_gather_object
from ds_etp.parallel.topology import Topology

T = TypeVar("T")


def union_over_stages(by_stage: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """The entries of all pipeline stages by name, in their order. Of what several hold, the first stage's counts."""
    union: dict[str, T] = {}
    for entries in by_stage:
        for name, entry in entries.items():
            union.setdefault(name, entry)
    return union


def all_gather_stages(own: T, topology: Topology) -> list[T]:
    """What each pipeline stage's first rank says. Collective over the world where there is more than one stage.

    Args:
        own: the same on every rank of a pipeline stage.
        topology: how many pipeline stages there are.
    """
    if topology.pp == 1:
        return [own]
    first_ranks = topology.group_of("pp", 0)
    answers = all_gather_object(own if dist.get_rank() in first_ranks else None)
    return [answers[rank] for rank in first_ranks]
