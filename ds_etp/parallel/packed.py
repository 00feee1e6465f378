"""Sums over peers that are written where they are sent from: one message for each dtype, and no joining of columns.

`collectives.PackedAllReduce` is the same for sums that every peer wants whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ds_etp.parallel.collectives import by_dtype, reduce_scatter_single
from ds_etp.parallel.process_groups import ProcessGroupInfo


class PackedReduceScatter:
    """Tensors of the same rows, as many for each peer, of which every peer gets the sum of its own.

    Args:
        models: trailing shape and dtype of each.
        rows: of all peers together.
        device: where they are.
        dtype: what they are summed in; None for their own.

    Attributes:
        parts: what this rank adds, as views of the messages. To be filled in.
    """

    def __init__(
        self,
        models: Sequence[tuple[torch.Size, torch.dtype]],
        rows: int,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._models, self._rows = models, rows
        numbers_of = by_dtype([own for _, own in models], dtype)
        self._numbers = list(numbers_of.values())
        self._messages = [
            torch.empty(rows, sum(prod(models[number][0]) for number in numbers), dtype=sent, device=device)
            for sent, numbers in numbers_of.items()
        ]
        self.parts = self._views(self._messages)

    def over(self, peers: ProcessGroupInfo) -> list[Tensor]:
        """This rank's rows of the sums, each in its own dtype."""
        received = self._messages
        if peers.size > 1:
            received = [message.new_empty(self._rows // peers.size, message.shape[1]) for message in self._messages]
            for out, message in zip(received, self._messages, strict=True):
                reduce_scatter_single(out, message, group=peers.group)
        return [part.to(dtype) for part, (_, dtype) in zip(self._views(received), self._models, strict=True)]

    def _views(self, messages: Sequence[Tensor]) -> list[Tensor]:
        views: dict[int, Tensor] = {}
        for message, numbers in zip(messages, self._numbers, strict=True):
            shapes = [self._models[number][0] for number in numbers]
            for number, shape, columns in zip(
                numbers, shapes, message.split([prod(shape) for shape in shapes], 1), strict=True
            ):
                views[number] = columns.unflatten(1, shape)
        return [views[number] for number in range(len(self._models))]
