"""Segment sums: rows added up by where they belong, without atomics, so that the same rows give the same bits.

A sum is made in fp32 (float64 for float64), whatever the rows' dtype, and cast once. torch's `index_add_` and
`scatter_add_` add in the rows' own dtype, and on CUDA in any order.

Legend: a rows, n segments, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


@dataclass(frozen=True)
class Segments:
    """Which rows belong to which segment.

    Attributes:
        order: `[a]`, row numbers, segment by segment.
        offsets: `[n]`, where each segment starts in `order`.
    """

    order: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, ids: Tensor, count: int) -> Segments:
        """From the segment of each row, `[a]` of 0 to `count` - 1. No host sync."""
        ids, order = ids.sort(stable=True)
        return cls(order, torch.searchsorted(ids, torch.arange(count, device=ids.device)))

    def sum(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Sums of rows `[>= a, H]`, in `dtype` or the rows' own: `[n, H]`, zeros for a segment without rows."""
        # The one op of torch that gathers and sums in a single pass, with an accumulator wider than its result.
        return embedding_bag(self.order, rows.to(dtype or rows.dtype), self.offsets, mode="sum")
