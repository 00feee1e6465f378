"""Who sends how many rows where: the bookkeeping of the all-to-all plans, and their pair of transposed ops.

Legend: T tokens in this rank's batch, t tokens it owns, a (row, local expert) assignments, H hidden size,
K experts per token. A rank's place in its block of ep * etp ranks is `p = e * etp + j`. A lane is the ep group
of one j. An owner is near where all ranks of this rank's expt_tp group hold its tokens: they are
tensor-parallel peers of it. Near tokens are taken from this rank's own batch, all others have to be sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_etp.parallel.async_ops import Trip, fly
from ds_etp.parallel.autograd import Meanwhile
from ds_etp.parallel.collectives import all_gather_single, even_sizes
from ds_etp.parallel.process_groups import ExpertGroups


class Places:
    """What is fixed as long as the groups are: where this rank is, and whose tokens it holds.

    Attributes:
        ep, etp: sizes; e, j, place: this rank's indices along them, and its place in the block.
        near: places whose tokens this rank holds, in order; empty where etp doesn't divide tp.
        near_ep: ep indices of those.
        all_near: whether every rank of the block is near every other.
    """

    def __init__(self, groups: ExpertGroups) -> None:
        self.groups = groups
        self.ep, self.etp = groups.topology.ep, groups.topology.etp
        self.e, self.j = groups.ep.index, groups.expt_tp.index
        self.place = self.e * self.etp + self.j
        self.near_to = [self._near_to(place) for place in range(self.ep * self.etp)]
        self.near = self.near_to[self.place]
        self.near_ep = {place // self.etp for place in self.near}
        self.all_near = len(self.near) == self.ep * self.etp
        # For the check that peers count alike: factors that make sums over counts differ when counts do, as good as
        # always, and whose counts each place knows.
        self.factors = (torch.arange(self.ep * self.etp * self.ep) + 1).mul(7919).remainder(1000003).view(-1, self.ep)
        self.sees = torch.zeros(len(self.near_to), len(self.near_to), dtype=torch.int64)
        for place, seen in enumerate(self.near_to):
            self.sees[place, seen or [place]] = 1
        self._seen_factors = self.factors[self.near or [self.place]]

    def seen_factors(self, device: torch.device) -> Tensor:
        """Factors of the places whose counts this rank knows, on the device they are counted on."""
        if self._seen_factors.device != device:
            self._seen_factors = self._seen_factors.to(device)
        return self._seen_factors

    def _near_to(self, place: int) -> list[int]:
        tp, ranks = self.groups.topology.tp, self.groups.expert_model_parallel.ranks
        if tp % self.etp:
            return []
        return [other for other, rank in enumerate(ranks) if rank // tp == ranks[place] // tp]

    def group(self, e: int) -> range:
        """The places of one ep index: an expt_tp group."""
        return range(e * self.etp, (e + 1) * self.etp)


class Table:
    """One call's counts, known to every rank of the block.

    Attributes:
        owned: t by place.
        rows: by place of the owner and ep index, how many of the owner's tokens want an expert there.
    """

    def __init__(self, places: Places, wanted: Tensor, sizes: list[int], own: int) -> None:
        """Exchanges counts: one message, collective over the block.

        Args:
            places: this rank's.
            wanted: `[rows, ep]`, whether a token wants an expert of an ep index, for the near owners' tokens
                or, where none is near, for this rank's own.
            sizes: how many of the rows each of those owners has.
            own: this rank's place among them.

        Raises:
            RuntimeError: on every rank of the block, where tensor-parallel peers have routed the same tokens
                differently. Peers would wait for rows that never come.
        """
        counts = torch.stack([part.sum(0) for part in wanted.split(sizes)])
        mark = (counts * places.seen_factors(counts.device)).sum()
        row = torch.cat([mark[None], counts.new_full((1,), sizes[own]), counts[own]])
        block = places.groups.expert_model_parallel
        gathered = row.new_empty(block.size * len(row))
        if block.size > 1:
            all_gather_single(gathered, row, group=block.group)
        else:
            gathered = row
        table = gathered.view(block.size, -1).cpu()
        right = places.sees @ (table[:, 2:] * places.factors).sum(1)
        wrong = (table[:, 0] != right).nonzero()[:, 0].tolist()
        if wrong:
            raise RuntimeError(
                f"ranks {[block.ranks[place] for place in wrong]} have routed tokens otherwise than their "
                "tensor-parallel peers, which hold the same ones. Seed them alike, or turn off the router's noise."
            )
        self.owned: list[int] = table[:, 1].tolist()
        self.rows: list[list[int]] = table[:, 2:].tolist()


class Route(ABC):
    """One call of a layer: rows out to the experts, and sums over them back, each the other's transpose."""

    @abstractmethod
    def spread(self, tensor: Tensor) -> Tensor:
        """Tokens `[T, H]`, alike on tensor-parallel peers, to one row per assignment `[a, H]`."""

    @abstractmethod
    def open(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`spread` of tokens with their indices and weights, which tells what the assignments are."""

    @abstractmethod
    def trip(self) -> Trip:
        """`collect` of one tensor, and `spread` backward, in halves."""

    @abstractmethod
    def collect(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The sum over assignments `[a, H]`, by token: `[T, H]`. A second tensor holds weights: `[T, K]`."""


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, index: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.route = route
        x, index, weights = route.open(x, index, weights)
        ctx.mark_non_differentiable(index)
        return x, index, weights

    @staticmethod
    def backward(ctx: Any, x: Tensor, _: Any, weights: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.route.collect(x, weights)


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, partial: Tensor) -> Tensor:
        ctx.route = route
        return route.collect(partial)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.route.spread(grad)


def dispatch(route: Route, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens `[T, H]`, `[T, K]`, `[T, K]` to assignments `[a, H]`, `[a, k]`, `[a, k]`."""
    x, index, weights = _Dispatch.apply(route, index, x, weights)
    return x, index, weights


def combine(route: Route, partial: Tensor, meanwhile: Meanwhile = None) -> Tensor:
    """Partial outputs `[a, H]` to the outputs of this rank's tokens `[T, H]`."""
    if meanwhile is not None:
        return fly(route.trip(), partial, meanwhile)
    result: Tensor = _Combine.apply(route, partial)
    return result


def owned_rows(places: Places, tokens: int) -> tuple[list[int], list[int]]:
    """Where each place's tokens start in this rank's batch, and how many they are; meant for near places."""
    tp, ranks = places.groups.topology.tp, places.groups.expert_model_parallel.ranks
    sizes = even_sizes(tokens, tp)
    return [sum(sizes[: rank % tp]) for rank in ranks], [sizes[rank % tp] for rank in ranks]
