"""What dispatchers share: their interface, the rows they hand out, and rows in and out of the family's forward.

Legend: T tokens in this rank's batch, t tokens it owns (tensor-parallel peers hold the same batch and own
a share each), n rows this rank's experts work on, a (row, local expert) assignments, H hidden size,
K experts per token, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_etp.dispatch.pairs import LocalPairs, are_few
from ds_etp.dispatch.permute import permute, unpermute
from ds_etp.parallel import autograd as c
from ds_etp.parallel.autograd import OverlapFn
from ds_etp.parallel.process_groups import ExpertGroups, ProcessGroupInfo
from ds_etp.parallel.topology import GroupKind


@dataclass(frozen=True)
class DispatchOptions:
    """What the experts module asks of its dispatcher.

    Attributes:
        sorted_rows: whether the forward that follows takes one row for each pair, in the order of their experts, and
            skips those with an index one above this rank's last.
        needs_counts: whether it has to know on the host how many rows each expert has.
    """

    sorted_rows: bool = False
    needs_counts: bool = False


PLAIN = DispatchOptions()


@dataclass
class DispatchOutput:
    """What one rank's experts work on, and what its dispatcher needs to bring the results back.

    Attributes:
        x: `[a, H]`.
        index: `[a, k]`, over this rank's experts.
        weights: `[a, k]`.
        pairs: the assignments of the n rows, where this rank picked them; None where rows are assignments.
        num_tokens_received: n, how many rows arrived.
        tokens: T, how many tokens the module was called with.
        handle: what the dispatcher itself needs for `combine`, or to dispatch once more.
        by_expert: whether rows are pairs, with one index each, in the order of their experts.
        has_sentinels: whether rows behind them may be nobody's.
        counts: rows of each local expert, where they were asked for.
    """

    x: Tensor
    index: Tensor
    weights: Tensor
    pairs: LocalPairs | None
    num_tokens_received: int
    tokens: int
    handle: Any = None
    by_expert: bool = False
    has_sentinels: bool = False
    counts: tuple[int, ...] | None = None

    def without_tensors(self) -> DispatchOutput:
        """What `combine` needs of it, and another `dispatch` of the same tokens: the rows themselves may go."""
        none = self.x.new_empty(0)
        return replace(self, x=none, index=none, weights=none)


class TokenDispatcher(ABC):
    """A dispatcher for one experts module.

    Args:
        groups: the process groups.
        num_experts: E.
        reduce_dtype: what partial sums are added up in; None for their own dtype.
    """

    private_groups: ClassVar[frozenset[GroupKind]] = frozenset()  # those of `PRIVATE_KINDS` that it sends over

    def __init__(self, groups: ExpertGroups, num_experts: int, reduce_dtype: torch.dtype | None = None) -> None:
        self.groups = groups
        self.reduce_dtype = reduce_dtype
        self.local_experts = num_experts // groups.topology.ep
        self.first_expert = groups.ep.index * self.local_experts

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatcher:
        # Process groups can't be copied; a copied module (an EMA, say) talks to the same peers.
        return self

    @abstractmethod
    def dispatch(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        options: DispatchOptions = PLAIN,
        again: DispatchOutput | None = None,
    ) -> DispatchOutput:
        """From this rank's tokens `[T, H]`, `[T, K]`, `[T, K]` to the rows its experts work on.

        Args:
            x: tokens, alike on tensor-parallel peers.
            index: over all experts.
            weights: of the index.
            options: what the forward that follows takes.
            again: what the same tokens were dispatched to before, when they are in backward to be dispatched once more.
                The host then waits for nothing.
        """

    @abstractmethod
    def combine(self, partial: Tensor, rows: DispatchOutput, overlap_fn: OverlapFn = None) -> Tensor:
        """From this rank's partial outputs `[a, H]` to the outputs of its own tokens `[T, H]`.

        Where there is a message to wait for, `overlap_fn` is called once it has started.
        """

    @abstractmethod
    def rows_sent(self, rows: DispatchOutput) -> int:
        """Rows of H that this rank sends in one call, out and back; without the gather over tp. As `cost` counts them.

        From what the host knows anyway. A rank of an all-reduce sends what it would in a ring.
        """

    def makes_pairs(self, options: DispatchOptions) -> bool:
        """Whether rows are (token, local expert) pairs.

        Among ep ranks, since families don't agree on an index for "not here"; and for a forward that would else sort
        them itself, with copies out and back.
        """
        return self.groups.topology.ep > 1 or options.sorted_rows

    def _local_pairs(self, x: Tensor, index: Tensor, options: DispatchOptions) -> LocalPairs:
        """The pairs of rows that have arrived, where no message has told their number."""
        if self.groups.topology.ep == 1:  # every choice is one
            return LocalPairs.of(index, self.first_expert, self.local_experts, count=index.numel())
        few = not options.needs_counts and are_few(index, self.local_experts, x)
        return LocalPairs.of(index, self.first_expert, self.local_experts, with_sentinels=options.sorted_rows and few)

    def _to_local(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        tokens: int,
        options: DispatchOptions,
        *,
        again: DispatchOutput | None,
        copied: ProcessGroupInfo | None = None,
    ) -> DispatchOutput:
        """Rows whose assignments are all to local experts, or to none; at least one row.

        `copied`: peers that all hold these tokens, and among whom gradients are to be summed.
        """
        count, pairs = len(x), None
        if self.makes_pairs(options):
            pairs = self._local_pairs(x, index, options) if again is None else again.pairs
            assert pairs is not None
            index = pairs.index
            x, weights = permute(
                copied, pairs.by_row, pairs.row, pairs.k_index, x, weights, reduce_dtype=self.reduce_dtype
            )
        elif copied is not None:
            x, weights = c.copy_to_group(copied, x, weights, reduce_dtype=self.reduce_dtype)
        counts = None if pairs is None else pairs.counts
        if again is not None:
            counts = again.counts
        elif pairs is None and options.needs_counts:
            counts = LocalPairs.of(index, self.first_expert, self.local_experts).counts
        x, index, weights = at_least_one_row(x, index, weights)
        return DispatchOutput(
            x,
            index,
            weights,
            pairs,
            count,
            tokens,
            by_expert=pairs is not None,
            has_sentinels=pairs is not None and pairs.has_sentinels,
            counts=counts,
        )

    def _from_local(self, partial: Tensor, rows: DispatchOutput, *, copied: ProcessGroupInfo | None = None) -> Tensor:
        """Partial outputs `[a, H]` summed by row: `[n, H]`; over the peers too that got a copy of the rows."""
        pairs, kept = rows.pairs, rows.num_tokens_received if rows.pairs is None else len(rows.pairs.row)
        if len(partial) > kept:
            partial = partial[:kept]  # without the row that kept the graph
        if pairs is None:
            return partial if copied is None else c.reduce_from_group(copied, partial, reduce_dtype=self.reduce_dtype)
        return unpermute(copied, pairs.by_row, pairs.row, partial, reduce_dtype=self.reduce_dtype)


def at_least_one_row(x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as they are, or one of zeros with weight zero where there is none.

    A family's forward may lose its graph without rows, and peers would wait for its backward. That row keeps the graph
    and adds exactly nothing.
    """
    if len(x):
        return x, index, weights
    return (
        torch.cat([x, x.new_zeros(1, x.shape[1])]),
        torch.cat([index, index.new_zeros(1, index.shape[1])]),
        torch.cat([weights, weights.new_zeros(1, weights.shape[1])]),
    )
