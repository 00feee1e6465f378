"""Blocks of tensors that are made of others: every one is what indexing the whole gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_etp.checkpoint.chunks import Chunk
from ds_etp.loading.lazy import LazyTensor
from ds_etp.loading.nodes import FileTensor, materialize

Build = Callable[[list[Tensor]], Tensor]
BUILDS: dict[str, Build] = {  # of four tensors [3, 5]
    "stacked": torch.stack,
    "stacked last": lambda ts: torch.stack(ts, -1),
    "gate and up": lambda ts: torch.cat([torch.stack(ts[:2]), torch.stack(ts[2:])], dim=1),
    "transposed": lambda ts: torch.stack(ts).transpose(-1, -2).contiguous(),
    "permuted": lambda ts: torch.stack(ts).permute(2, 0, 1),
    "interleaved": lambda ts: torch.stack(ts).reshape(2, 2, 3, 5).transpose(1, 2).reshape(2, 6, 5),
    "a chunk": lambda ts: torch.cat(ts).chunk(4)[2].contiguous(),
    "a split": lambda ts: torch.stack(ts).split([1, 2], 1)[1],
    "one of a stack": lambda ts: torch.stack(ts)[2],
    "squeezed": lambda ts: torch.stack(ts).chunk(4, 0)[1].squeeze(0),
    "sliced": lambda ts: torch.stack(ts)[1:, ..., -3:],
    "rounded": lambda ts: torch.stack(ts).to(torch.bfloat16),
    "rounded on the way": lambda ts: torch.stack(ts).to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("name", BUILDS)
def test_any_block(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(3, 5, generator=generator) for _ in range(4)]
    wanted = BUILDS[name](parts)
    made = BUILDS[name]([LazyTensor(FileTensor(part)) for part in parts])
    assert isinstance(made, LazyTensor)  # no data was touched
    assert made.shape == wanted.shape
    assert made.dtype == wanted.dtype
    assert torch.equal(materialize(made.node), wanted)
    for _ in range(20):
        start = tuple(int(torch.randint(size, (), generator=generator)) for size in wanted.shape)
        size = tuple(
            int(torch.randint(1, n - a + 1, (), generator=generator)) for n, a in zip(wanted.shape, start, strict=True)
        )
        block = torch.empty(size, dtype=wanted.dtype)
        made.node.fill(block, Chunk(start, size))
        assert torch.equal(block, wanted[Chunk(start, size).slices()])


def test_other_operations_take_the_data() -> None:
    lazy = LazyTensor(FileTensor(torch.arange(6.0)))
    result = lazy.flip(0) + 1
    assert type(result) is torch.Tensor
    assert result.tolist() == [6, 5, 4, 3, 2, 1]


def test_writing_is_refused() -> None:
    """What is written would be lost: the data is made anew from the files."""
    with pytest.raises(NotImplementedError, match="not read yet"):
        LazyTensor(FileTensor(torch.zeros(2))).add_(1)
