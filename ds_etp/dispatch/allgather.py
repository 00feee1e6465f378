"""All-gather dispatch: every expert rank gets the tokens of all of them.

Forward: all-gather over expert_model_parallel -> permute -> reduce-scatter -> all-gather over tp.

A rank's own rows are packed once, and what arrives is read in place: a peer's rows start at a multiple of the longest
peer's, and no expert is asked for those between. Legend as in `base`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.dispatch.base import PLAIN, DispatchOptions, DispatchOutput, TokenDispatcher, at_least_one_row
from ds_etp.dispatch.cost import tokens_are_replicated
from ds_etp.dispatch.pairs import LocalPairs
from ds_etp.parallel import autograd as c
from ds_etp.parallel.collectives import (
    all_gather_padded,
    all_gather_rows,
    all_gather_single,
    balanced_splits,
    pack_columns,
    packed_width,
    unpack_views,
)
from ds_etp.parallel.host import expand_ranges, to_host
from ds_etp.parallel.packed import PackedReduceScatter

_NOBODY = -1  # the words of rows that a message is padded with: their expert index is -1 too


@dataclass
class _Gathered:
    """One call's rows, as they lie in the message that was gathered.

    Attributes:
        sizes: the rows of each expert rank.
        num_rows: of the message.
        real_rows: `[n]`, which of them are rows of a peer; None where all are.
        pairs: of the message's rows; None where rows are handed out as they came.
        counts: rows of each local expert, where they were asked for.
    """

    sizes: list[int]
    num_rows: int
    real_rows: Tensor | None
    pairs: LocalPairs | None
    counts: tuple[int, ...] | None


class _Dispatch(Function):
    """Hands out what was gathered; backward brings gradients `[a, H]` and `[a, k]` back to the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        dispatcher: AllGather,
        gathered: _Gathered,
        rows: tuple[Tensor, Tensor],
        x: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.dispatcher, ctx.gathered, ctx.choices, ctx.tokens = dispatcher, gathered, weights.shape[1], len(x)
        return rows

    @staticmethod
    def backward(ctx: Any, x: Tensor, weights: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.dispatcher.to_tokens(ctx.gathered, ctx.tokens, ctx.choices, x, weights)


class AllGather(TokenDispatcher):
    """For few expert ranks, or tokens that want most of them anyway: one message out and one back.

    Ranks tell each other before how many tokens they have, and how many pairs each expert: one message, one wait of the
    host. Where expert ranks are tensor-parallel peers they hold one batch, and know.
    """

    def dispatch(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        options: DispatchOptions = PLAIN,
        again: DispatchOutput | None = None,
    ) -> DispatchOutput:
        """See `TokenDispatcher.dispatch`. Forward: sizes, unless known, and an all-gather over the expert ranks."""
        with torch.no_grad():
            gathered, rows, local = self._gather(x, index, weights, options, None if again is None else again.handle)
        rows = _Dispatch.apply(self, gathered, rows, x, weights)
        has_pairs = gathered.pairs is not None
        x_rows, local, weight_rows = at_least_one_row(rows[0], local, rows[1])
        return DispatchOutput(
            x_rows,
            local,
            weight_rows,
            gathered.pairs,
            gathered.num_rows if has_pairs else sum(gathered.sizes),
            len(x),
            gathered,
            by_expert=has_pairs,
            has_sentinels=gathered.pairs is not None and gathered.pairs.has_sentinels,
            counts=gathered.counts,
        )

    def combine(self, partial: Tensor, rows: DispatchOutput, overlap_fn: c.OverlapFn = None) -> Tensor:
        """See `TokenDispatcher.combine`. Forward: a reduce-scatter over the expert ranks, and an all-gather over tp."""
        y, expert_peers, sizes = self._from_local(partial, rows), self.groups.expert_model_parallel, rows.handle.sizes
        own = sizes[expert_peers.index]
        if rows.pairs is not None:  # by rows of the message, which are as many of each peer
            sizes = [max(sizes)] * len(sizes)
        y = c.reduce_scatter(expert_peers, sizes, y, reduce_dtype=self.reduce_dtype, overlap_fn=overlap_fn)
        return c.gather_from_tp(self.groups.tp, rows.tokens, (y if len(y) == own else y[:own]).to(partial.dtype))

    def rows_sent(self, rows: DispatchOutput) -> int:
        """See `TokenDispatcher.rows_sent`."""
        sizes: list[int] = rows.handle.sizes
        return 2 * (len(sizes) - 1) * max(sizes)

    def _gather(
        self, x: Tensor, index: Tensor, weights: Tensor, options: DispatchOptions, known: _Gathered | None
    ) -> tuple[_Gathered, tuple[Tensor, Tensor], Tensor]:
        """What was gathered, this rank's rows of it, and their local index."""
        tp = self.groups.tp
        splits = balanced_splits(len(x), tp.size)
        start = sum(splits[: tp.index])
        own_index = index[start : start + splits[tp.index]]
        sizes, counts = self._table(splits, own_index, options) if known is None else (known.sizes, known.counts)
        own = [tensor[start : start + splits[tp.index]] for tensor in (x, weights)]
        views = self._message([*own, own_index.to(torch.int32)], max(sizes))  # half the bytes to send
        if known is None:
            known = self._read(sizes, counts, views, options)
        if known.pairs is not None:
            row, k_index = known.pairs.row, known.pairs.k_index
            rows = views[0].index_select(0, row), views[1][row, k_index, None]
            return known, rows, known.pairs.index.to(index.dtype)
        if known.real_rows is not None:
            views = [view.index_select(0, known.real_rows) for view in views]
        else:  # out of the message; without peers too, as a function of autograd should return no view of its inputs
            views = [view.clone(memory_format=torch.contiguous_format) for view in views]
        return known, (views[0], views[1]), views[2].to(index.dtype)

    def _message(self, own: list[Tensor], longest: int) -> list[Tensor]:
        """Every peer's rows of own tensors, from row `longest * i` on."""
        peers = self.groups.expert_model_parallel
        if peers.size == 1:
            return own
        message = own[0].new_empty(longest, packed_width(own), dtype=torch.int64)
        message[len(own[0]) :] = _NOBODY
        pack_columns(own, out=message[: len(own[0])])
        return list(unpack_views(all_gather_padded(message, longest, peers), own))

    def _table(
        self, splits: list[int], own_index: Tensor, options: DispatchOptions
    ) -> tuple[list[int], tuple[int, ...] | None]:
        """How many tokens each expert rank owns, and how many pairs each local expert has, if a message told."""
        groups, peers, experts = self.groups, self.groups.expert_model_parallel, self.local_experts
        if tokens_are_replicated(groups.topology):
            return [splits[rank % groups.topology.tp] for rank in peers.ranks], None
        ends = own_index.new_zeros(0)
        if groups.topology.ep > 1 or options.needs_counts:
            chosen = own_index.flatten().sort().values
            numbers = torch.arange(experts * groups.topology.ep, device=own_index.device, dtype=own_index.dtype)
            ends = torch.searchsorted(chosen, numbers, right=True)
        row = torch.cat([ends.new_full((1,), len(own_index), dtype=torch.int64), ends.to(torch.int64)])
        gathered = row.new_empty(peers.size * len(row))
        all_gather_single(gathered, row, group=peers.group)
        table = to_host(gathered).reshape(peers.size, -1)
        counts = None
        if table.shape[1] > 1:
            counts = np.diff(table[:, 1:].sum(0), prepend=0)[self.first_expert : self.first_expert + experts]
        return table[:, 0].tolist(), None if counts is None else tuple(counts.tolist())

    def _read(
        self, sizes: list[int], counts: tuple[int, ...] | None, views: list[Tensor], options: DispatchOptions
    ) -> _Gathered:
        """What is to be known of a message."""
        x, _, index = views
        if not self.makes_pairs(options):
            if counts is None and options.needs_counts:
                counts = LocalPairs.of(index, self.first_expert, self.local_experts).counts
            longest, real_rows = max(sizes), None
            if min(sizes) < longest:
                starts = np.arange(len(sizes), dtype=np.int64) * longest
                (real_rows,) = expand_ranges(x.device, (starts, np.array(sizes, dtype=np.int64)))
            return _Gathered(sizes, len(x), real_rows, None, counts)
        first, experts = self.first_expert, self.local_experts
        if counts is not None:
            pairs = LocalPairs.of(index, first, experts, counts=counts)
        elif self.groups.topology.ep == 1:
            pairs = LocalPairs.of(index, first, experts, count=sum(sizes) * index.shape[1])
        else:
            pairs = self._local_pairs(x, index, options)
        return _Gathered(sizes, len(x), None, pairs, pairs.counts)

    def to_tokens(
        self, gathered: _Gathered, tokens: int, choices: int, x: Tensor, weights: Tensor
    ) -> tuple[Tensor, ...]:
        """The transpose of `dispatch`: gradients of the rows and of their weights, to those of the tokens."""
        groups, peers = self.groups, self.groups.expert_model_parallel
        models = [(x.shape[1:], x.dtype), (torch.Size([choices]), weights.dtype)]
        sums = PackedReduceScatter(models, gathered.num_rows, x.device, self.reduce_dtype)
        if gathered.pairs is not None:
            row, k_index = gathered.pairs.row, gathered.pairs.k_index
            sums.parts[0].copy_(gathered.pairs.by_row.sum(x, sums.parts[0].dtype))
            # No pair occurs twice.
            sums.parts[1].zero_()[row, k_index] = weights[: len(row), 0].to(sums.parts[1].dtype)
        else:
            for total, grad in zip(sums.parts, (x, weights), strict=True):
                if gathered.real_rows is None:
                    total.copy_(grad)
                else:
                    total.zero_()[gathered.real_rows] = grad.to(total.dtype)
        own = gathered.sizes[peers.index]
        result = [total[:own] for total in sums.over(peers)]
        return all_gather_rows(result, balanced_splits(tokens, groups.tp.size), groups.tp)
