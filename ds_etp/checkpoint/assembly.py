"""A logical tensor from the parts of it that ranks hold, and a rank's part of a logical tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ds_etp.checkpoint.chunks import Chunk, LocalChunk, Shape


def assemble(
    full: Tensor, parts: Mapping[int, tuple[Shape, Sequence[LocalChunk]]], fetch: Callable[[int, Shape], Tensor]
) -> Tensor:
    """Fills a logical tensor from what ranks hold of it, one rank's part in memory at a time.

    Args:
        full: of the logical tensor's shape; filled in place.
        parts: by rank, the shape of its part and its chunks.
        fetch: brings a rank's part, of the shape it is given. Called for every rank, in order.

    Returns:
        `full`.
    """
    filled: set[Chunk] = set()
    for holder, (shape, chunks) in parts.items():
        part = fetch(holder, shape)
        for chunk in chunks:
            if chunk.logical not in filled:  # of what several hold, the first one's counts
                full[chunk.logical.slices()] = chunk.of(part)
            filled.add(chunk.logical)
    return full


def take_chunks(full: Tensor, shape: Shape, chunks: Iterable[LocalChunk]) -> Tensor:
    """The reverse: a rank's part, of `shape`, in memory of its own."""
    part = full.new_empty(shape)
    for chunk in chunks:
        chunk.of(part).copy_(full[chunk.logical.slices()])
    return part
