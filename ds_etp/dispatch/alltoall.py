"""Plans that send a token only to ranks that have an expert for it, once to each: what both orders share.

Between ranks of one lane (the `ep` group) rows travel by all-to-all; the ranks of one `expt_tp` group, which
hold slices of the same experts, share rows and merge partial results among themselves. The words are those of
`exchange`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ds_etp.dispatch.base import BasePlan, Rows
from ds_etp.dispatch.room import Room
from ds_etp.dispatch.routing_table import Places, Route, Table, combine, dispatch, owned_rows
from ds_etp.parallel.async_ops import Flight, Trip, landed, start_all_to_all
from ds_etp.parallel.autograd import Meanwhile
from ds_etp.parallel.collectives import all_gather_padded, all_gather_rows, all_to_all_rows, even_sizes, ranges


class Lanes(Route):
    """Assignments are picked from the pool, and from what arrives over the lanes.

    The pool is this rank's batch or, where an order gathers first, what it gathered. A rank sends the pool
    rows it represents: its own tokens, or those of its whole `expt_tp` group.

    Attributes:
        represented, near_rows: pool rows this rank sends, and pool rows of near owners.
        near_owners, kept: places of those owners, and ep indices that nothing is sent to.
        send, receive: rows out over the lane, by ep index.
        longest_far: most rows that a rank of the `expt_tp` group gets over its lane, where those are gathered next;
            else None.
        direct: whether sums of represented rows are added up where they stay, after those that go back. Where
            `expt_tp` peers have parts of them they are merged first.
        union: rows of all sums that are made here.
        counts_back: rows back over the lane, out and in by ep index, none to this rank, and rows they are summed to.
    """

    represented: slice | Tensor
    near_rows: slice | Tensor
    near_owners: list[int]
    kept: set[int]
    longest_far: int | None = None
    direct: bool
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
        rows = self._with_far(pool)
        far_rows, far_places = self._far()
        self.source, self.choice = torch.cat([near_rows, far_rows + len(pool[0])]), None
        self.to, self.choices = torch.cat([near_places, far_places]), weights.shape[1]
        local = rows[2].index_select(0, self.source)
        if self.places.ep > 1:
            row, self.choice, local = self.plan._local_pairs(local)
            self.source, self.to = self.source[row], self.to[row]
        picked = self._picked(rows[1])
        if len(local) == 0:
            local, picked = local.new_zeros(1, 1), picked[:, :1]
        elif self.choice is not None:
            picked = picked.gather(1, self.choice[:, None])
        return self._picked(rows[0]), local.to(index.dtype), picked

    def spread(self, tensor: Tensor) -> Tensor:
        """See `Route.spread`."""
        return self._picked(self._with_far(self._pool([tensor]))[0])

    def collect(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `Route.collect`."""
        back, own = self._add_up(tensors)
        if self.places.ep > 1:
            send, receive, _ = self.counts_back
            back = all_to_all_rows(back, send, receive, self.groups.ep)
        return self.own_tokens(own, back, [tensor.dtype for tensor in tensors])

    def _add_up(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Sums of `collect`'s tensors, each by row: those that go back, and those of represented rows."""
        send, _, rows = self.counts_back
        sums = self._before_back([self._summed(tensor, number > 0) for number, tensor in enumerate(tensors)])
        if self.places.ep == 1:
            # Without padding, and no views: see `own_tokens`.
            return [], [total if len(total) == rows else total[:rows].clone() for total in sums]
        cut = sum(send)
        back, own = [total[:cut] for total in sums], [total[cut:] for total in sums]
        if not self.direct:
            stayed = [part[: len(self.stayed)] for part in own]
            own = [part.new_zeros(rows, part.shape[1]).index_add_(0, self.stayed, part) for part in stayed]
        return back, own

    def _summed(self, tensor: Tensor, weights: bool) -> Tensor:
        """Assignments `[a, ...]` added up by row: `[union, ...]`, rows in the order they go back in.

        Sums are made in memory of their own, and packed after that: adding to parts of wider rows is several times
        slower on a CPU.
        """
        tensor = tensor[: len(self.to)].to(self.plan.reduce_dtype or tensor.dtype)
        total = tensor.new_zeros(self.union, self.choices if weights else tensor.shape[1])
        if not weights:
            return total.index_add_(0, self.to, tensor)
        if self.choice is None:
            return total.index_put_((self.to,), tensor)
        return total.index_put_((self.to, self.choice), tensor[:, 0])

    def own_tokens(
        self, own: Sequence[Tensor], back: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> tuple[Tensor, ...]:
        """From sums of represented rows, and those that came back over the lane, to tokens `[T, ...]`."""
        if self.places.ep > 1:  # not in place: they are views, and a function of autograd should return none
            own = [total.index_add(0, self.returned, part) for total, part in zip(own, back, strict=True)]
        result = [total.to(dtype) for total, dtype in zip(self._after_back(own), dtypes, strict=True)]
        return all_gather_rows(result, even_sizes(self.tokens, self.groups.tp.size), self.groups.tp)

    def trip(self) -> Trip:
        """See `Route.trip`."""
        return _LanesTrip(self)

    def _plan_rows(self, pool_index: Tensor) -> tuple[Tensor, Tensor]:
        """Notes what to send; returns the pool rows that are wanted here, and where their sums go."""
        e = self.places.e
        wanted = self._wanted_of(self.represented, pool_index)
        own_last = torch.cat([wanted[:, :e], wanted[:, e + 1 :], wanted[:, e : e + 1]], dim=1).t().nonzero()[:, 1]
        back = sum(self.counts_back[1])
        self.returned, self.stayed = own_last[:back], own_last[back:]  # back come also those that were not sent
        sent = self.returned if self.kept == {e} else _sent(wanted, self.kept)
        self.send_rows = _within(self.represented, sent)
        lengths = [self.table.rows[owner][e] for owner in self.near_owners]
        places = ranges([self._place_of(owner) for owner in self.near_owners], lengths, self.device)
        if not self.near_owners:
            return places, places
        if self.direct:
            start = sum(lengths[: self.near_owners.index(self.places.group(e)[0])])
            places[start : start + len(self.stayed)] = self.stayed + sum(self.counts_back[0])
        here = self._wanted_of(self.near_rows, pool_index)[:, e]
        return _within(self.near_rows, here.nonzero()[:, 0]), places

    def _wanted_of(self, rows: slice | Tensor, pool_index: Tensor) -> Tensor:
        if isinstance(rows, slice):  # of this rank's own batch
            return self.wanted[rows.start - self.held.start : rows.stop - self.held.start]
        return self.plan.wanted(pool_index.index_select(0, rows))

    def _with_far(self, pool: Sequence[Tensor]) -> Sequence[Tensor]:
        """The pool's tensors, and behind each what arrives over the lanes."""
        if self.places.all_near:
            return pool
        room = self.room(pool)
        out = room.arriving if self.longest_far is None else None
        (message,) = all_to_all_rows([self.out(room)], self.send, self.receive, self.groups.ep, out=out)
        return self.arrived(room, message)

    def room(self, pool: Sequence[Tensor]) -> Room:
        """The pool, with room for what arrives."""
        longest = self.longest_far
        return Room(pool, sum(self.receive) if longest is None else longest * self.places.etp)

    def out(self, room: Room) -> Tensor:
        """What goes out over the lanes."""
        return room.held.index_select(0, self.send_rows)

    def arrived(self, room: Room, message: Tensor) -> Sequence[Tensor]:
        """The pool's tensors, each with what came over the lane of this rank, or of its `expt_tp` group."""
        if self.longest_far is not None:
            all_gather_padded(message, self.longest_far, self.groups.expt_tp, out=room.arriving)
        elif message is not room.arriving:
            room.arriving.copy_(message)
        return room.tensors()

    def _picked(self, rows: Tensor) -> Tensor:
        """One row per assignment. A row of zeros where there is none.

        A family's forward may lose its graph without rows, and peers would wait for its backward; a row of
        zeros with weight zero keeps the graph and adds exactly nothing.
        """
        if len(self.source) == 0:
            return rows.new_zeros(1, rows.shape[1])
        return rows.index_select(0, self.source)

    @abstractmethod
    def _pool(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """From this rank's batch to the pool."""

    @abstractmethod
    def _far(self) -> tuple[Tensor, Tensor]:
        """Rows of what arrives, without padding, and where their sums go."""

    @abstractmethod
    def _place_of(self, owner: int) -> int:
        """Where the sums of an owner's rows start."""

    def _before_back(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """What `expt_tp` peers make of sums `[union, ...]` before they go back over the lanes."""
        return sums

    def _after_back(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """What they make of those that came back, to have this rank's own tokens `[t, ...]`."""
        return sums


class _LanesTrip(Trip):
    """Over the lanes, which may leave a node: the message that travels is the all-to-all."""

    def __init__(self, route: Lanes) -> None:
        self.route = route
        self.dtype = torch.float32
        self.own: Sequence[Tensor] = ()
        self.pool: Sequence[Tensor] = ()
        self.room: Room | None = None

    def out(self, tensor: Tensor) -> Flight:
        route = self.route
        self.dtype = tensor.dtype
        back, self.own = route._add_up([tensor])
        if route.places.ep == 1:
            return landed(tensor[:0])
        send, receive, _ = route.counts_back
        return start_all_to_all(back[0], send, receive, route.groups.ep)

    def arrive(self, tensor: Tensor) -> Tensor:
        own, self.own = self.own, ()
        return self.route.own_tokens(own, [tensor], [self.dtype])[0]

    def back(self, grad: Tensor) -> Flight:
        route = self.route
        self.pool = route._pool([grad])
        if route.places.all_near:
            return landed(grad[:0])
        self.room = route.room(self.pool)
        message = route.out(self.room)
        if route.places.ep == 1:
            return landed(message)
        return start_all_to_all(message, route.send, route.receive, route.groups.ep)

    def arrive_back(self, tensor: Tensor) -> Tensor:
        pool, room, self.pool, self.room = self.pool, self.room, (), None
        return self.route._picked((pool if room is None else self.route.arrived(room, tensor))[0])


def without(counts: Sequence[int], indices: Container[int]) -> list[int]:
    """Counts by ep index, with none at some of them."""
    return [0 if e in indices else count for e, count in enumerate(counts)]


def _sent(wanted: Tensor, kept: set[int]) -> Tensor:
    """Rows of `[n, ep]` that are wanted at other ep indices than some, by ep index."""
    wanted = wanted.clone()
    for e in kept:  # a list as an index would be copied to the device
        wanted[:, e] = False
    return wanted.t().nonzero()[:, 1]


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
        return Rows(x, index, weights, None, len(x), tokens, route, by_expert=self.groups.topology.ep > 1)

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
