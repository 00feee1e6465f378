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
        parts: by rank, the shape of its part and its pieces.
        fetch: brings a rank's part, of the shape it is given. Called for every rank, in order.

    Returns:
        `full`.
    """
    filled: set[Chunk] = set()
    for holder, (shape, pieces) in parts.items():
        part = fetch(holder, shape)
        for piece in pieces:
            if piece.box not in filled:  # of what several hold, the first one's counts
                full[piece.box.slices()] = piece.of(part)
            filled.add(piece.box)
    return full


def take_pieces(full: Tensor, shape: Shape, pieces: Iterable[LocalChunk]) -> Tensor:
    """The reverse: a rank's part, of `shape`, in memory of its own."""
    part = full.new_empty(shape)
    for piece in pieces:
        piece.of(part).copy_(full[piece.box.slices()])
    return part
