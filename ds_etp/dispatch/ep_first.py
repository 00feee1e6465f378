"""The all-to-all plan that sends over `ep` first, and shares over `expt_tp` what arrived: the fewest rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_etp.dispatch.alltoall import AllToAll, Lanes, without
from ds_etp.parallel.collectives import ranges, reduce_scatter_padded


class _Route(Lanes):
    """Sums are merged over `expt_tp` in a section for each lane, and go back over the lanes.

    Sections are padded to the longest: with uniform routing they differ by little.
    """

    def __init__(self, plan: AllToAll, index: Tensor) -> None:
        super().__init__(plan, index)
        at, rows = self.places, self.table.rows
        self.represented, self.near_rows = self.own, self.held
        self.near_owners, self.kept, self.direct = at.near, at.near_ep, at.etp == 1
        here = [rows[e * at.etp + at.j][at.e] for e in range(at.ep)]  # wanted at this ep index, by who owns it
        self.send, self.receive = without(rows[at.place], self.kept), without(here, self.kept)
        self._far_owners = [[e * at.etp + j for e in range(at.ep) if e not in self.kept] for j in range(at.etp)]
        far = [sum(rows[owner][at.e] for owner in lane) for lane in self._far_owners]
        self.longest_far = max(far) if at.etp > 1 else None
        self._longest = max(sum(rows[e * at.etp + j][at.e] for e in range(at.ep)) for j in range(at.etp))
        self.counts_back = without(here, {at.e}), without(rows[at.place], {at.e}), self.sizes[at.place]
        self.union = self._longest * at.etp
        if self.direct:
            self.union = sum(self.counts_back[0]) + self.sizes[at.place]

    def _pool(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def _far(self) -> tuple[Tensor, Tensor]:
        starts, lengths, places = [], [], []
        for lane, owners in enumerate(self._far_owners):
            start = lane * (self.longest_far or 0)
            for owner in owners:
                starts.append(start)
                lengths.append(self.table.rows[owner][self.places.e])
                places.append(self._place_of(owner))
                start += lengths[-1]
        return ranges(starts, lengths, self.device), ranges(places, lengths, self.device)

    def _place_of(self, owner: int) -> int:
        at = self.places
        e, j = divmod(owner, at.etp)
        end = at.ep if e == at.e else e  # this rank's own come last
        before = sum(self.table.rows[other * at.etp + j][at.e] for other in range(end) if other != at.e)
        return j * self._longest + before

    def _before_back(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        return reduce_scatter_padded(sums, self._longest, self.groups.expt_tp)


class DispatchFirst(AllToAll):
    """Forward: sizes, an all-to-all over ep, an all-gather over expt_tp, and their transposes back.

    Where tensor-parallel peers hold all of a block's tokens nothing goes out, and only the way back remains.
    """

    route = _Route
