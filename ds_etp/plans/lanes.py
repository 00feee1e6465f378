"""Plans that send a token only to ranks that have an expert for it, once to each: what both orders share.

Between ranks of one lane (the `ep` group) rows travel by all-to-all; the ranks of one `expt_tp` group, which
hold slices of the same experts, share rows and merge partial results among themselves. The words are those of
`exchange`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_etp.collectives import Meanwhile
from ds_etp.flights import Flight, Trip, landed, start_all_to_all
from ds_etp.plans.base import BasePlan, Rows
from ds_etp.plans.exchange import Places, Route, Table, combine, dispatch, owned_rows
from ds_etp.rows import all_gather_rows, all_to_all_rows, even_sizes, pack_rows, ranges, view_rows, zero_rows


class Lanes(Route):
    """Rows of near owners are picked from a pool, others arrive over the lanes.

    The pool is this rank's batch or, where an order gathers first, what it gathered. A rank sends the pool
    rows it represents: its own tokens, or those of its whole `expt_tp` group.

    Attributes:
        represented, near_rows: pool rows this rank sends, and pool rows of near owners.
        near_owners, kept: places of those owners, and ep indices that nothing is sent to.
        send, receive: rows out over the lane, by ep index.
        union: rows of the sums on their way back.
        counts_back: rows back over the lane, out and in by ep index, and rows they are summed to.
    """

    represented: slice | Tensor
    near_rows: slice | Tensor
    near_owners: list[int]
    kept: set[int]
    send: list[int]
    receive: list[int]
    union: int
    counts_back: tuple[list[int], list[int], int]

    def __init__(self, plan: AllToAll, index: Tensor) -> None:
        self.plan, self.places, self.groups = plan, plan.places, plan.groups
        self.tokens, self.device = len(index), index.device
        self.starts, self.sizes = owned_rows(self.places, self.tokens)
        place = self.places.place
        owners = self.places.near or [place]
        first = self.starts[owners[0]]
        self.own = slice(self.starts[place], self.starts[place] + self.sizes[place])
        self.held = slice(first, first + sum(self.sizes[owner] for owner in owners))
        self.wanted = plan.wanted(index[self.held])
        self.table = Table(self.places, self.wanted, [self.sizes[owner] for owner in owners], owners.index(place))

    def open(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Route.open`."""
        pool = self._pool([x, weights, index.to(torch.int32)])  # half the bytes on the wire
        near_rows, near_places = self._plan_rows(pool[2])
        far = self._travel(pool)
        far_rows, far_places = self._far()
        self.to, self.choices = torch.cat([near_places, far_places]), weights.shape[1]
        local = torch.cat([pool[2].index_select(0, near_rows), far[2].index_select(0, far_rows)])
        self.from_pool, self.from_far, self.choice = near_rows, far_rows, None
        if self.places.ep > 1:
            row, self.choice, local = self.plan._local_pairs(local)
            near_count = int((row < len(near_rows)).sum())
            self.from_pool = near_rows[row[:near_count]]
            self.from_far = far_rows[row[near_count:] - len(near_rows)]
            self.to = self.to[row]
        picked = self._picked(pool[1], far[1])
        if len(local) == 0:
            local, picked = local.new_zeros(1, 1), picked[:, :1]
        elif self.choice is not None:
            picked = picked.gather(1, self.choice[:, None])
        return self._picked(pool[0], far[0]), local.to(index.dtype), picked

    def spread(self, tensor: Tensor) -> Tensor:
        """See `Route.spread`."""
        pool = self._pool([tensor.contiguous()])
        return self._picked(pool[0], self._travel(pool)[0])

    def collect(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `Route.collect`."""
        send, receive, _ = self.counts_back
        message, sums = self._message(tensors)
        for number, (total, tensor) in enumerate(zip(sums, tensors, strict=True)):
            self._place(total, tensor, weights=number > 0)
        merged = self._before_back(sums)
        if self.places.ep > 1:
            if merged[0] is not sums[0]:
                message = merged[0] if len(merged) == 1 else pack_rows(merged)
            (message,) = all_to_all_rows([message[: sum(send)]], send, receive, self.groups.ep)
            merged = [message] if len(merged) == 1 else list(view_rows(message, merged))
        return self.own_tokens(merged, [tensor.dtype for tensor in tensors])

    def _message(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What goes back of `collect`'s tensors, as zeros: the message, and a view of it for each."""
        dtypes = [self.plan.reduce_dtype or tensor.dtype for tensor in tensors]
        widths = [tensors[0].shape[1], *[self.choices] * (len(tensors) - 1)]
        models = [
            tensor.new_empty(0, width, dtype=dtype)
            for tensor, width, dtype in zip(tensors, widths, dtypes, strict=True)
        ]
        if len(models) == 1:
            message = models[0].new_zeros(self.union, widths[0])
            return message, [message]
        message = zero_rows(models, self.union)
        return message, list(view_rows(message, models))

    def own_tokens(self, sums: list[Tensor], dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
        """From sums that came back over the lane to tokens `[T, ...]`."""
        rows = self.counts_back[2]
        if self.places.ep > 1:  # sums by the token they are of
            sums = [total.new_zeros(rows, total.shape[1]).index_add_(0, self.returned, total) for total in sums]
        else:
            sums = [total[:rows] for total in sums]
        own = [total.to(dtype) for total, dtype in zip(self._after_back(sums), dtypes, strict=True)]
        return all_gather_rows(own, even_sizes(self.tokens, self.groups.tp.size), self.groups.tp)

    def trip(self) -> Trip:
        """See `Route.trip`."""
        return _LanesTrip(self)

    def _plan_rows(self, pool_index: Tensor) -> tuple[Tensor, Tensor]:
        """Notes what to send; returns the pool rows that are wanted here, and where their sums go."""
        wanted = self._wanted_of(self.represented, pool_index)
        self.returned = wanted.t().nonzero()[:, 1]  # back come all, also those that were not sent
        far = wanted.clone()
        far[:, sorted(self.kept)] = False
        self.send_rows = _within(self.represented, far.t().nonzero()[:, 1])
        lengths = [self.table.rows[owner][self.places.e] for owner in self.near_owners]
        places = ranges([self._place_of(owner) for owner in self.near_owners], lengths, self.device)
        if not self.near_owners:
            return places, places
        here = self._wanted_of(self.near_rows, pool_index)[:, self.places.e]
        return _within(self.near_rows, here.nonzero()[:, 0]), places

    def _wanted_of(self, rows: slice | Tensor, pool_index: Tensor) -> Tensor:
        if isinstance(rows, slice):  # of this rank's own batch
            return self.wanted[rows.start - self.held.start : rows.stop - self.held.start]
        return self.plan.wanted(pool_index.index_select(0, rows))

    def _travel(self, pool: Sequence[Tensor]) -> Sequence[Tensor]:
        """What arrives over the lanes, a tensor for every one of the pool."""
        if self.places.all_near:
            return [tensor[:0] for tensor in pool]
        message = pack_rows(pool, self.send_rows)
        (message,) = all_to_all_rows([message], self.send, self.receive, self.groups.ep)
        return view_rows(self._after_lanes(message), pool)

    def _picked(self, pool: Tensor, far: Tensor) -> Tensor:
        """One row per assignment, copied once. A row of zeros where there is none.

        A family's forward may lose its graph without rows, and peers would wait for its backward; a row of
        zeros with weight zero keeps the graph and adds exactly nothing.
        """
        near_count = len(self.from_pool)
        count = near_count + len(self.from_far)
        if count == 0:
            return pool.new_zeros(1, pool.shape[1])
        rows = pool.new_empty(count, pool.shape[1])
        torch.index_select(pool, 0, self.from_pool, out=rows[:near_count])
        torch.index_select(far, 0, self.from_far, out=rows[near_count:])
        return rows

    def _place(self, total: Tensor, tensor: Tensor, weights: bool) -> None:
        """Adds assignments up by row, in zeros `[union, ...]`, rows in the order they go back in."""
        tensor = tensor[: len(self.to)].to(total.dtype)
        if not weights:
            total.index_add_(0, self.to, tensor)
        elif self.choice is None:
            total.index_put_((self.to,), tensor)
        else:
            total.index_put_((self.to, self.choice), tensor[:, 0])

    @abstractmethod
    def _pool(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """From this rank's batch to the pool."""

    @abstractmethod
    def _after_lanes(self, message: Tensor) -> Tensor:
        """What `expt_tp` peers make of rows that arrived."""

    @abstractmethod
    def _far(self) -> tuple[Tensor, Tensor]:
        """Rows of that message, without padding, and where their sums go."""

    @abstractmethod
    def _place_of(self, owner: int) -> int:
        """Where the sums of an owner's rows start."""

    def _before_back(self, sums: list[Tensor]) -> list[Tensor]:
        """What `expt_tp` peers make of sums `[union, ...]` before they go back over the lanes."""
        return sums

    def _after_back(self, sums: list[Tensor]) -> list[Tensor]:
        """What they make of those that came back, to have this rank's own tokens `[t, ...]`."""
        return sums


class _LanesTrip(Trip):
    """Over the lanes, which may leave a node: the message that travels is the all-to-all."""

    def __init__(self, route: Lanes) -> None:
        self.route = route
        self.dtype = torch.float32
        self.pool: Sequence[Tensor] = ()

    def out(self, tensor: Tensor) -> Flight:
        route = self.route
        self.dtype = tensor.dtype
        _, sums = route._message([tensor])
        route._place(sums[0], tensor, weights=False)
        (total,) = route._before_back(sums)
        send, receive, _ = route.counts_back
        if route.places.ep == 1:
            return landed(total)
        return start_all_to_all(total[: sum(send)], send, receive, route.groups.ep)

    def arrive(self, tensor: Tensor) -> Tensor:
        return self.route.own_tokens([tensor], [self.dtype])[0]

    def back(self, grad: Tensor) -> Flight:
        route = self.route
        self.pool = route._pool([grad.contiguous()])
        if route.places.all_near:
            return landed(self.pool[0][:0])
        message = pack_rows(self.pool, route.send_rows)
        if route.places.ep == 1:
            return landed(message)
        return start_all_to_all(message, route.send, route.receive, route.groups.ep)

    def arrive_back(self, tensor: Tensor) -> Tensor:
        route, pool, self.pool = self.route, self.pool, ()
        far = tensor if route.places.all_near else view_rows(route._after_lanes(tensor), pool)[0]
        return route._picked(pool[0], far)


def _within(rows: slice | Tensor, picked: Tensor) -> Tensor:
    return picked + rows.start if isinstance(rows, slice) else rows[picked]


class AllToAll(BasePlan):
    """For every topology. Counts of all ranks of the block are exchanged once per layer."""

    route: type[Lanes]
    _places: Places | None = None

    def dispatch(self, x: Tensor, index: Tensor, weights: Tensor, *, marked: bool = False) -> Rows:
        """See `Plan.dispatch`. The host has to know counts here, so rows are never marked."""
        route, tokens = self.route(self, index), len(x)
        x, index, weights = dispatch(route, x, index, weights)
        return Rows(x, index, weights, None, len(x), tokens, route)

    def combine(self, partial: Tensor, rows: Rows, meanwhile: Meanwhile = None) -> Tensor:
        """See `Plan.combine`."""
        return combine(rows.route, partial, meanwhile)

    @property
    def places(self) -> Places:
        """This rank's places, worked out once."""
        if self._places is None:
            self._places = Places(self.groups)
        return self._places

    def wanted(self, index: Tensor) -> Tensor:
        """Which ep indices have an expert for each row of `[n, K]`: `[n, ep]`."""
        wanted = torch.zeros(len(index), self.groups.ep.size, dtype=torch.bool, device=index.device)
        return wanted.scatter_(1, (index // self.local_experts).long(), True)
