"""Counts of the host, as arrays, and the rows of a mask that the device makes of them without telling anything back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_etp.parallel.host import Ints


@dataclass(frozen=True)
class MaskedRows:
    """Rows of a mask `[rows, ep]`, ep_rank by ep_rank.

    Attributes:
        rows: `[bounds[-1]]`, row numbers of the mask, by ep_rank, then ascending.
        bounds: `[ep + 1]`, where those of each ep_rank start and stop.
    """

    rows: Tensor
    bounds: list[int]

    @classmethod
    def of(cls, ep_mask: Tensor, counts: Ints) -> MaskedRows:
        """The rows that are set in a mask whose column sums the host knows."""
        bounds = [0, *counts.cumsum().tolist()]
        return cls(torch.nonzero_static(ep_mask.t(), size=bounds[-1])[:, 1], bounds)

    def without(self, ep_ranks: range) -> Tensor:
        """The rows of all ep_ranks but some neighbours."""
        start, stop = self.bounds[ep_ranks.start], self.bounds[ep_ranks.stop]
        return self.rows if start == stop else torch.cat([self.rows[:start], self.rows[stop:]])

    def at(self, ep_rank: int) -> Tensor:
        """The rows of one."""
        return self.rows[self.bounds[ep_rank] : self.bounds[ep_rank + 1]]


def zero_at(counts: Ints, ep_ranks: range) -> Ints:
    """Counts `[ep, ...]` with none at some neighbours."""
    zeroed = counts.copy()
    zeroed[ep_ranks.start : ep_ranks.stop] = 0
    return zeroed


def starts_of(counts: Ints) -> Ints:
    """Where each run of `[n, ...]` starts, if they lie one after the other."""
    starts: Ints = counts.cumsum(0) - counts
    return starts


def as_ints(counts: Ints) -> tuple[int, ...]:
    """Counts `[n]` of the host as numbers."""
    return tuple(counts.tolist())
