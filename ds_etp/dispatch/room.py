"""Rows at hand, and room behind them for rows that arrive, so that both can be picked from alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_etp.parallel.collectives import pack_rows, packed_width, view_rows


class Room:
    """A pool's rows, packed where there are several tensors, and room behind them.

    Args:
        pool: tensors of the same rows.
        arriving: how many rows there is room for.

    Attributes:
        held, arriving: the pool's rows and the room, as views of one message.
    """

    def __init__(self, pool: Sequence[Tensor], arriving: int) -> None:
        self._pool, own = pool, len(pool[0])
        if len(pool) == 1:
            self._rows = pool[0].new_empty(own + arriving, *pool[0].shape[1:])
            self._rows[:own].copy_(pool[0])
        else:
            self._rows = pool[0].new_empty(own + arriving, packed_width(pool), dtype=torch.uint8)
            pack_rows(pool, out=self._rows[:own])
        self.held, self.arriving = self._rows[:own], self._rows[own:]

    def tensors(self) -> Sequence[Tensor]:
        """All rows, a tensor for every one of the pool."""
        return [self._rows] if len(self._pool) == 1 else view_rows(self._rows, self._pool)
