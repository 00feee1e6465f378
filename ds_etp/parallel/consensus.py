"""Consensus over all ranks: a failure of one is raised on all, so that no peer waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ds_etp.errors import CheckpointError


@contextmanager
def raise_on_all_ranks(what: str) -> Iterator[None]:
    """Runs a block on every rank, then compares how it went. The block itself holds no collective that could
    be left half-way.

    Args:
        what: what the block does, for the message.

    Raises:
        CheckpointError: on every rank, if the block raised on any; it names the ranks and their reasons.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_if_any_failed(what, failure)


def raise_if_any_failed(what: str, failure: Exception | None) -> None:
    """Tells every rank of this rank's failure, if any, and raises if there was one anywhere."""
    reasons = all_gather_object(None if failure is None else reason_of(failure))
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return
    first = failed[0][1]
    if all(reason == first for _, reason in failed):
        ranks = "every rank" if len(failed) == len(reasons) else f"rank {', '.join(str(rank) for rank, _ in failed)}"
        text = f"{what} failed on {ranks}: {first}"
    else:
        text = f"{what} failed: " + "; ".join(f"rank {rank}: {reason}" for rank, reason in failed)
    raise CheckpointError(text) from failure


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_same_on_all_ranks(what: str, value: Any) -> None:
    """Checks that every rank gave the same arguments.

    Raises:
        CheckpointError: on every rank; it lists what they gave.
    """
    given = all_gather_object(value)
    if any(other != given[0] for other in given):
        raise CheckpointError(f"{what}: ranks disagree on what: {sorted({str(other) for other in given})}")


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def reason_of(failure: Exception) -> str:
    """A failure in words that mean something on another rank."""
    if isinstance(failure, CheckpointError):
        return str(failure)
    # An OSError's own text has the errno's meaning and the file.
    return f"{type(failure).__name__}: {failure}"
