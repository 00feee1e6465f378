"""The (row, local expert) pairs of a rank, expert by expert: one row each is what a family's forward works on.

How many there are is for the device to say. Three ways to know, the first that can be:

    counts        another message has brought them to the host: no wait
    sentinels     as many rows as there can be at most, those beyond the pairs marked as nobody's: no wait, but the
                  experts' rows take up to ep times the memory, so for few rows only (`FEW_BYTES`)
    a copy        of the counts, which the host waits for

Legend: n rows that arrived, K experts per token, a pairs, E_local experts on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ds_etp.dispatch.segments import Segments
from ds_etp.parallel.host import to_host

# Up to this many bytes of rows `[n * min(K, E_local), H]` there may be sentinels. A forward with gated experts keeps
# about three times as much, so they cost at most 12 MiB a layer; one pass over that is 4 us at 3 TB/s, less than it
# takes to fill an empty queue again with a few launches. By arithmetic: not measured on a GPU.
FEW_BYTES = 4 * 2**20


@dataclass(frozen=True)
class LocalPairs:
    """Pairs in the order of their experts.

    Attributes:
        row: `[a]`, of the n rows.
        k_index: `[a]`, which of the row's K experts it is.
        index: `[a, 1]`, over this rank's experts; E_local for a sentinel, which is behind all pairs.
        num_rows: n.
        counts: pairs of each local expert, where the host knows.
        has_sentinels: whether there may be any.
    """

    row: Tensor
    k_index: Tensor
    index: Tensor
    num_rows: int
    counts: tuple[int, ...] | None
    has_sentinels: bool

    @classmethod
    def of(
        cls,
        index: Tensor,
        first_expert: int,
        num_local_experts: int,
        *,
        count: int | None = None,
        counts: Sequence[int] | None = None,
        with_sentinels: bool = False,
    ) -> LocalPairs:
        """Of rows' expert indices `[n, K]` those to experts of this rank.

        Args:
            index: over all experts; anything negative is nobody's.
            first_expert, num_local_experts: which experts are here.
            count: how many pairs there are, where the host knows.
            counts: of each local expert, where the host knows.
            with_sentinels: whether there may be sentinels, where it doesn't.
        """
        n, k = index.shape
        local = index - first_expert
        elsewhere = (local < 0) | (local >= num_local_experts)
        expert, order = local.masked_fill(elsewhere, num_local_experts).flatten().int().sort(stable=True)
        if counts is None and count is None and not with_sentinels:
            numbers = torch.arange(num_local_experts, device=index.device, dtype=expert.dtype)
            ends = to_host(torch.searchsorted(expert, numbers, right=True)).tolist()
            counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        if counts is not None:
            count = sum(counts)
        has_sentinels = count is None
        if count is None:
            count = n * min(k, num_local_experts)
        order = order[:count]
        row = order // max(k, 1)
        return cls(
            row,
            order - row * k,
            expert[:count, None].to(index.dtype),
            n,
            None if counts is None else tuple(counts),
            has_sentinels,
        )

    @cached_property
    def by_row(self) -> Segments:
        """The pairs of each of the n rows."""
        return Segments.of(self.row, self.num_rows)


def are_few(index: Tensor, num_local_experts: int, x: Tensor) -> bool:
    """Whether rows `x` `[n, H]` with K choices each are few enough to have sentinels."""
    return len(x) * min(index.shape[1], num_local_experts) * x.shape[1] * x.element_size() <= FEW_BYTES
