"""One contiguous buffer: local rows, then space the all-to-all receives into, so that both are indexed at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_etp.parallel.collectives import pack_columns, packed_width, unpack_views


class RecvBuffer:
    """Local rows, packed where there are several tensors, and space behind them.

    Args:
        tensors: of the same rows.
        received: how many rows there is space for.

    Attributes:
        local, recv: the local rows and the space, as views of one buffer.
    """

    def __init__(self, tensors: Sequence[Tensor], received: int) -> None:
        self._like, rows = tensors, len(tensors[0])
        if len(tensors) == 1:
            self._rows = tensors[0].new_empty(rows + received, *tensors[0].shape[1:])
            self._rows[:rows].copy_(tensors[0])
        else:
            self._rows = tensors[0].new_empty(rows + received, packed_width(tensors), dtype=torch.int64)
            pack_columns(tensors, out=self._rows[:rows])
        self.local, self.recv = self._rows[:rows], self._rows[rows:]

    def tensors(self) -> Sequence[Tensor]:
        """All rows, a tensor for each of the local ones."""
        return [self._rows] if len(self._like) == 1 else unpack_views(self._rows, self._like)
