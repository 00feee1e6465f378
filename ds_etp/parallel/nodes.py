"""How many neighbouring ranks share a node: where a message leaves NVLink for the network.

Some launchers say so (torchrun, deepspeed, accelerate), others don't (srun, mpirun): there, hosts are compared by name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ds_etp.parallel.consensus import all_gather_object

_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
_HOST_NAMES = "host names"


@dataclass(frozen=True)
class NodeSize:
    """Ranks per node, the fewest of any node, and where that is known from."""

    ranks: int
    source: str

    def __str__(self) -> str:
        return f"{self.ranks} ({self.source})"


def node_size() -> NodeSize:
    """What the launchers of all ranks say, or the names of their hosts. Collective, and the same on every rank."""
    said = {name: os.environ.get(name, "") for name in _VARIABLES}
    name = next((name for name, value in said.items() if value.isdecimal() and int(value)), _HOST_NAMES)
    return smallest_node(all_gather_object((socket.gethostname(), name, int(said.get(name, 0)))))


def smallest_node(ranks: Sequence[tuple[str, str, int]]) -> NodeSize:
    """The node with the fewest ranks.

    Groups are among neighbours, so ranks of a host count only as far as they follow each other: where ranks are dealt
    out to hosts in turn (`srun --distribution=cyclic`), every message leaves its host.

    Args:
        ranks: of each rank, its host, the variable in which its launcher says how many are there, and that number;
            0 where none does.
    """
    sizes: list[tuple[int, str]] = [(size, name) for _, name, size in ranks if size]
    for _, run in groupby(ranks, key=lambda rank: rank[0]):
        neighbours = list(run)
        if any(not size for _, _, size in neighbours):
            sizes.append((len(neighbours), _HOST_NAMES))
    return NodeSize(*min(sizes))
