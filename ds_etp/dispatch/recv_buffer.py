"""One contiguous buffer: some local rows, then space the all-to-all receives into, so that both are indexed at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_etp.parallel.collectives import gather_columns, packed_width, unpack_views


class RecvBuffer:
    """Local rows, packed where there are several tensors, and space behind them.

    Args:
        tensors: of the same rows.
        local_rows: which of them are wanted.
        received: how many rows there is space for.

    Attributes:
        recv: the space, as a view of the buffer.
    """

    def __init__(self, tensors: Sequence[Tensor], local_rows: Tensor, received: int) -> None:
        self._like, rows = tensors, len(local_rows)
        if len(tensors) == 1:
            self._rows = tensors[0].new_empty(rows + received, *tensors[0].shape[1:])
            torch.index_select(tensors[0], 0, local_rows, out=self._rows[:rows])
        else:
            self._rows = tensors[0].new_empty(rows + received, packed_width(tensors), dtype=torch.int64)
            gather_columns(tensors, local_rows, out=self._rows[:rows])
        self.recv = self._rows[rows:]

    def tensors(self) -> Sequence[Tensor]:
        """All rows, a tensor for each of those that were given."""
        return [self._rows] if len(self._like) == 1 else unpack_views(self._rows, self._like)


def select_rows(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """A message of some rows: of one tensor as they are, of several packed."""
    return tensors[0].index_select(0, rows) if len(tensors) == 1 else gather_columns(tensors, rows)
