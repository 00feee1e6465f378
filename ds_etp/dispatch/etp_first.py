"""The all-to-all plan in which `expt_tp` peers share their tokens first: fewer messages where they hold the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_etp.dispatch.alltoall import AllToAll, Lanes, without
from ds_etp.parallel.collectives import all_gather_padded, pack_rows, ranges, reduce_scatter_rows, view_rows


class _Route(Lanes):
    """A rank sends the tokens of its whole `expt_tp` group; sums come back and are merged over it last."""

    def __init__(self, plan: AllToAll, index: Tensor) -> None:
        super().__init__(plan, index)
        at, rows = self.places, self.table.rows
        self.direct = True  # partial sums are merged once they are back
        self._owned = [self.table.owned[place] for place in at.group(at.e)]
        self._counts = [[sum(rows[p][e] for p in at.group(owners)) for e in range(at.ep)] for owners in range(at.ep)]
        if at.near:
            self.near_owners, self.kept, self.near_rows = at.near, at.near_ep, self.held
            start = self.starts[at.group(at.e)[0]]
            self.represented = slice(start, start + sum(self._owned))
        else:
            self.near_owners, self.kept = list(at.group(at.e)), {at.e}
            starts = [j * max(self._owned) for j in range(at.etp)]
            self.represented = self.near_rows = ranges(starts, self._owned, self.device)
        here = [counts[at.e] for counts in self._counts]  # wanted at this ep index, by who owns it
        self.send, self.receive = without(self._counts[at.e], self.kept), without(here, self.kept)
        self.counts_back = without(here, {at.e}), without(self._counts[at.e], {at.e}), sum(self._owned)
        self.union = sum(self.counts_back[0]) + sum(self._owned)

    def _pool(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.places.near:
            return tensors
        message = pack_rows([tensor[self.own] for tensor in tensors])
        return view_rows(all_gather_padded(message, max(self._owned), self.groups.expt_tp), tensors)

    def _far(self) -> tuple[Tensor, Tensor]:
        at = self.places
        places = ranges([self._place_of(e * at.etp) for e in range(at.ep)], self.receive, self.device)
        return torch.arange(len(places), device=self.device), places

    def _place_of(self, owner: int) -> int:
        others = [before for before in range(owner) if before not in self.places.group(self.places.e)]
        return sum(self.table.rows[before][self.places.e] for before in others)

    def _after_back(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        return reduce_scatter_rows(sums, self._owned, self.groups.expt_tp, None)


class GatherFirst(AllToAll):
    """Forward: sizes, an all-gather over expt_tp unless its peers hold the same tokens, an all-to-all over ep, and
    their transposes back. Messages over `expt_tp` have the batches' own shapes.
    """

    route = _Route
