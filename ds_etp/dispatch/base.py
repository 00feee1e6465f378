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

from ds_etp.dispatch.permute import permute, unpermute
from ds_etp.dispatch.segments import Segments
from ds_etp.parallel import autograd as c
from ds_etp.parallel.autograd import OverlapFn
from ds_etp.parallel.process_groups import ExpertGroups, ProcessGroupInfo
from ds_etp.parallel.topology import GroupKind


@dataclass
class DispatchOutput:
    """What one rank's experts work on, and what its dispatcher needs to bring the results back.

    Attributes:
        x: `[a, H]`.
        index: `[a, k]`, over this rank's experts.
        weights: `[a, k]`.
        token_index: `[a]`, which of the n rows an assignment belongs to; None where rows are assignments.
        by_token: the assignments of each of the n rows; None with `token_index`.
        num_tokens_received: n, how many rows arrived.
        tokens: T, how many tokens the module was called with.
        handle: what the dispatcher itself needs for `combine`.
        by_expert: whether rows are pairs, with one index each, in the order of their experts.
    """

    x: Tensor
    index: Tensor
    weights: Tensor
    token_index: Tensor | None
    by_token: Segments | None
    num_tokens_received: int
    tokens: int
    handle: Any = None
    by_expert: bool = False

    def without_tensors(self) -> DispatchOutput:
        """What `combine` needs of it: the rows themselves may go."""
        none = self.x.new_empty(0)
        return replace(self, x=none, index=none, weights=none)


class TokenDispatcher(ABC):
    """A dispatcher for one experts module.

    Args:
        groups: the process groups.
        num_experts: E.
        reduce_dtype: what partial sums are added up in; None for their own dtype.
        equal_batches: the config's promise that all ranks bring equally many tokens.
    """

    knows_shapes = False  # whether rows have shapes the host knows, as far as they can have sentinels
    private_groups: ClassVar[frozenset[GroupKind]] = frozenset()  # those of `PRIVATE_KINDS` that it sends over

    def __init__(
        self,
        groups: ExpertGroups,
        num_experts: int,
        reduce_dtype: torch.dtype | None = None,
        *,
        equal_batches: bool = False,
    ) -> None:
        self.groups = groups
        self.reduce_dtype = reduce_dtype
        self.equal_batches = equal_batches
        self.local_experts = num_experts // groups.topology.ep
        self.first_expert = groups.ep.index * self.local_experts

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatcher:
        # Process groups can't be copied; a copied module (an EMA, say) talks to the same peers.
        return self

    @abstractmethod
    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, *, with_sentinels: bool = False) -> DispatchOutput:
        """From this rank's tokens `[T, H]`, `[T, K]`, `[T, K]` to the rows its experts work on.

        Args:
            x: tokens, alike on tensor-parallel peers.
            index: over all experts.
            weights: of the index.
            with_sentinels: whether rows may come whole, with an index one above this rank's last where an expert of
                theirs is elsewhere. Dispatchers that know all shapes then ask nothing of the device.
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

    def _to_local(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        tokens: int,
        *,
        with_sentinels: bool,
        handle: Any = None,
        copied: ProcessGroupInfo | None = None,
    ) -> DispatchOutput:
        """Rows whose assignments are all to local experts, or a sentinel where they aren't; at least one row.

        `copied`: peers that all hold these tokens, and among whom gradients are to be summed.
        """
        count, token_index, by_token = len(x), None, None
        by_expert = self.groups.topology.ep > 1 and not with_sentinels
        if by_expert:
            # One row for each (token, local expert) pair: families don't agree on an index for "not here".
            token_index, choice, index = local_pairs(index, self.first_expert, self.local_experts)
            by_token = Segments.of(token_index, count)
            x, weights = permute(copied, by_token, token_index, choice, x, weights, reduce_dtype=self.reduce_dtype)
        else:
            if copied is not None:
                x, weights = c.copy_to_group(copied, x, weights, reduce_dtype=self.reduce_dtype)
            if self.groups.topology.ep > 1:
                local = index - self.first_expert
                elsewhere = (local < 0) | (local >= self.local_experts)
                index, weights = local.masked_fill(elsewhere, self.local_experts), weights.masked_fill(elsewhere, 0)
        if len(x) == 0:
            # A family's forward may lose its graph without rows, and peers would wait for its backward.
            # A row of zeros with weight zero keeps the graph and adds exactly nothing.
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
            index = torch.cat([index, index.new_zeros(1, index.shape[1])])
            weights = torch.cat([weights, weights.new_zeros(1, weights.shape[1])])
            if token_index is None:
                token_index = index.new_zeros(0, dtype=torch.int64)
                by_token = Segments.of(token_index, count)
        return DispatchOutput(x, index, weights, token_index, by_token, count, tokens, handle, by_expert)

    def _from_local(self, partial: Tensor, rows: DispatchOutput, *, copied: ProcessGroupInfo | None = None) -> Tensor:
        """Partial outputs `[a, H]` summed by row: `[n, H]`; over the peers too that got a copy of the rows."""
        if rows.token_index is None or rows.by_token is None:
            return partial if copied is None else c.reduce_from_group(copied, partial, reduce_dtype=self.reduce_dtype)
        if len(partial) > len(rows.token_index):
            partial = partial[: len(rows.token_index)]  # without the row that kept the graph
        return unpermute(copied, rows.by_token, rows.token_index, partial, reduce_dtype=self.reduce_dtype)


def local_pairs(
    index: Tensor, first_expert: int, num_local_experts: int, count: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows' expert indices `[n, K]` the local ones: their row and k_index, `[a]` each, and the local index `[a, 1]`.

    Expert by expert, as grouped matrix multiplies want them: rows are copied once, in that order. The host waits for
    the device, unless it knows `count`, how many there are.
    """
    local = index - first_expert
    is_local = (local >= 0) & (local < num_local_experts)
    pairs = is_local.nonzero() if count is None else torch.nonzero_static(is_local, size=count)
    row, k_index = pairs.unbind(1)
    local, order = local[row, k_index].sort(stable=True)
    return row[order], k_index[order], local[:, None]
