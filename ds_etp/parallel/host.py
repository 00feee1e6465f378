"""Copies between host and device: all there are in `dispatch` and `parallel`, so that waits of the host are counted.

    to_host      the host waits until the device has come to the values
    to_device    the host goes on; one copy from pinned memory

A kernel's launch doesn't wait. Operators whose result has a shape that the device decides do, so they aren't used:
`nonzero`, masks of booleans as an index, `repeat_interleave` without `output_size`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


def to_host(tensor: Tensor) -> Ints:
    """Values of a tensor of integers. The host waits for the device."""
    values: Ints = tensor.cpu().numpy()
    return values


def to_device(values: Ints, device: torch.device) -> Tensor:
    """A table of the host's on a device. The host doesn't wait, as on CUDA it would for memory that isn't pinned."""
    table = torch.from_numpy(values)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def expand_ranges(device: torch.device, *ranges: tuple[Ints, Ints]) -> list[Tensor]:
    """Several lists of ranges, each as the numbers in them, one after the other: `[sum(lengths)]` on the device.

    The ranges are copied in one message; their numbers are made on the device.

    Args:
        device: where the numbers are wanted.
        ranges: starts and lengths, `[n]` each.
    """
    starts = np.concatenate([of_list for of_list, _ in ranges])
    lengths = np.concatenate([of_list for _, of_list in ranges])
    sizes = [int(of_list.sum()) for _, of_list in ranges]
    before = lengths.cumsum() - lengths
    offset, count = to_device(np.stack([starts - before, lengths]), device)
    total = sum(sizes)
    numbers = offset.repeat_interleave(count, output_size=total) + torch.arange(total, device=device)
    return list(numbers.split(sizes))
