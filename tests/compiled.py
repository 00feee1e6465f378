"""torch.compile in worker processes, which conftest.py turns off for all other cases. Everything here runs in workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.oracle import Recipe, Run
from tests.sharded import Layout, make_engine, run_steps

_OFF = "TORCHDYNAMO_DISABLE"
OURS = "reason: ds_etp: "


@dataclass
class Traced:
    """What dynamo did in one run on one rank.

    Attributes:
        graphs: how many graphs it had made after each forward.
        breaks: graph breaks by their reason, over the whole run.
    """

    graphs: list[int] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)

    @property
    def own(self) -> int:
        """Graph breaks with a reason of ds_etp's."""
        return sum(count for reason, count in self.breaks.items() if OURS in reason)

    @property
    def others(self) -> list[str]:
        """All other reasons."""
        return [reason for reason in self.breaks if OURS not in reason]


@contextmanager
def dynamo() -> Iterator[Traced]:
    """Lets torch.compile compile, from an empty cache, and counts."""
    from torch._dynamo.utils import counters

    off = os.environ.pop(_OFF, None)
    torch._dynamo.reset()
    counters.clear()
    traced = Traced()
    # Every module's call and every function's is counted here, ours and the hosts'.
    try:
        yield traced
    finally:
        traced.breaks = dict(counters["graph_break"])
        torch._dynamo.reset()
        if off is not None:
            os.environ[_OFF] = off


def graphs_so_far() -> int:
    """How many graphs dynamo has made since `dynamo()`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@dataclass(frozen=True)
class Counting(Recipe):
    """A recipe that notes how many graphs there are after each forward."""

    graphs: Any = field(default_factory=list, compare=False)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Recipe.compute_loss`."""
        loss = super().compute_loss(*args, **kwargs)
        self.graphs.append(graphs_so_far())
        return loss
