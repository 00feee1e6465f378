"""Routing metadata of the all-to-all dispatchers: who owns which tokens, who needs them, and what follows from that.

    RankLayout       where this rank is, and whose tokens it holds; fixed as long as the groups are
    RoutingCounts    per call: how many tokens of each rank are needed at each ep_rank, exchanged in one message
    RoutingPlan      per call: splits and index tensors, a pure function of the two and of this rank's own mask

Legend: T tokens in this rank's batch, t tokens it owns (tensor-parallel peers hold the same batch and own a share
each), P = ep * etp ranks that hold one set of experts together. ep_rank and etp_rank are a rank's coordinates among
them, expert_mp_rank = ep_rank * etp + etp_rank. A rank is *TP-local* to this one if every member of this rank's
expt_tp group is a tensor-parallel peer of it: its tokens are here already and are never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ds_etp.dispatch.masked_rows import as_ints
from ds_etp.parallel.collectives import all_gather_single, balanced_splits
from ds_etp.parallel.host import Ints, to_host
from ds_etp.parallel.process_groups import ExpertGroups, ProcessGroupInfo
from ds_etp.parallel.topology import Topology


@dataclass(frozen=True)
class RankLayout:
    """Where one rank is among the expert ranks, and whose tokens it holds. Needs no process group.

    Attributes:
        topology: the parallel sizes.
        ranks: global ranks of `expert_model_parallel`, by expert_mp_rank.
        expert_mp_rank: this rank's place in it.
    """

    topology: Topology
    ranks: tuple[int, ...]
    expert_mp_rank: int

    @classmethod
    def of(cls, groups: ExpertGroups) -> RankLayout:
        """The layout of this process."""
        peers = groups.expert_model_parallel
        return cls(groups.topology, peers.ranks, peers.index)

    @property
    def ep(self) -> int:
        """Size of the ep group."""
        return self.topology.ep

    @property
    def etp(self) -> int:
        """Size of the expt_tp group."""
        return self.topology.etp

    @property
    def ep_rank(self) -> int:
        """This rank's index in its ep group."""
        return self.expert_mp_rank // self.etp

    @property
    def etp_rank(self) -> int:
        """This rank's index in its expt_tp group."""
        return self.expert_mp_rank % self.etp

    def tp_local_to(self, expert_mp_rank: int) -> range:
        """The ranks TP-local to one: neighbours. None where etp doesn't divide tp."""
        tp = self.topology.tp
        if tp % self.etp:
            return range(0)
        local = [i for i, rank in enumerate(self.ranks) if rank // tp == self.ranks[expert_mp_rank] // tp]
        return range(local[0], local[-1] + 1)

    @cached_property
    def tp_local_ranks(self) -> range:
        """expert_mp_ranks that are TP-local to this one, itself among them; none where etp doesn't divide tp."""
        return self.tp_local_to(self.expert_mp_rank)

    @property
    def tp_local_ep_ranks(self) -> range:
        """ep_ranks of those."""
        local = self.tp_local_ranks
        return range(local.start // self.etp, local.stop // self.etp)

    @property
    def all_tp_local(self) -> bool:
        """Whether nothing ever has to be sent to reach an expert."""
        return len(self.tp_local_ranks) == len(self.ranks)

    @property
    def expt_tp_ranks(self) -> range:
        """expert_mp_ranks of this rank's expt_tp group."""
        return range(self.ep_rank * self.etp, (self.ep_rank + 1) * self.etp)

    @property
    def held_ranks(self) -> range:
        """expert_mp_ranks whose tokens this rank counts: the TP-local ones, or itself alone."""
        return self.tp_local_ranks or range(self.expert_mp_rank, self.expert_mp_rank + 1)

    def owned(self, tokens: int, rank: int) -> range:
        """The rows of this rank's batch of T tokens that a TP-local expert_mp_rank owns, or this rank itself."""
        tp = self.topology.tp
        sizes, place = balanced_splits(tokens, tp), self.ranks[rank] % tp
        start = sum(sizes[:place])
        return range(start, start + sizes[place])

    def held_rows(self, tokens: int) -> range:
        """The rows of this rank's batch of T tokens that `held_ranks` own together."""
        held = self.held_ranks
        return range(self.owned(tokens, held[0]).start, self.owned(tokens, held[-1]).stop)


@dataclass(frozen=True)
class RoutingCounts:
    """One call's token counts, on the host; the first two are alike on every expert rank.

    Attributes:
        owned: `[P]`, t by expert_mp_rank.
        rows: `[ep, etp, ep]`, by ep_rank and etp_rank of the owner: how many of its tokens have an expert on each
            ep_rank.
        num_assignments: (token, expert) pairs of all ranks' tokens and this ep_rank's experts.
        experts: those of each local expert, where they were asked for.
    """

    owned: tuple[int, ...]
    rows: Ints
    num_assignments: int
    experts: tuple[int, ...] | None = None


@dataclass
class CountsExchange:
    """All-gathers counts over `expert_model_parallel`: one message and one copy to the host.

    TP peers hold the same tokens and must have routed them alike; otherwise their sends and receives would not match.
    Each rank sends a checksum of its own counts, and the sum of those of all ranks whose tokens it holds; every rank
    compares the two.
    """

    layout: RankLayout
    peers: ProcessGroupInfo
    local_experts: int
    _first_seen: Ints = field(init=False)  # [P]: the ranks whose counts each rank has a checksum of, from and up to
    _last_seen: Ints = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        # Runs of neighbours, as in `tp_local_to`, for all ranks at once.
        batch = np.array(layout.ranks) // (1 if layout.topology.tp % layout.etp else layout.topology.tp)
        self._first_seen, self._last_seen = (
            np.searchsorted(batch, batch, "left"),
            np.searchsorted(batch, batch, "right"),
        )

    def run(self, choices: Tensor, tokens: int, counted: Tensor | None = None) -> RoutingCounts:
        """Collective over the expert ranks. The one host sync of a call.

        Args:
            choices: `[rows, ep]`, how many experts on each ep_rank a row of `held_rows` has.
            tokens: T.
            counted: `[t, K]`, the experts of this rank's own tokens, where those of each expert are to be counted.

        Raises:
            RuntimeError: on every expert rank, where tensor-parallel peers have routed the same tokens differently.
        """
        layout, held, size = self.layout, self.layout.held_ranks, self.peers.size
        sizes = [len(layout.owned(tokens, rank)) for rank in held]
        counts = torch.stack([part.sum(0) for part in torch.cat([choices > 0, choices], 1).split(sizes)])
        # Weights make sums over counts differ when counts do, as good as always.
        first, last = held.start * 2 * layout.ep, held.stop * 2 * layout.ep
        weights = torch.arange(first + 1, last + 1, device=counts.device).mul(7919).remainder(1000003)
        own = held.index(layout.expert_mp_rank)
        checksums = (counts * weights.view_as(counts)).sum(1)
        row = [checksums.sum(0, keepdim=True), checksums[own, None], counts.new_full((1,), sizes[own]), counts[own]]
        if counted is not None:
            numbers = torch.arange(self.local_experts * layout.ep, device=counts.device)
            row.append(torch.searchsorted(counted.flatten().sort().values, numbers, right=True))
        gathered = message = torch.cat(row)
        if size > 1:
            gathered = message.new_empty(size * len(message))
            all_gather_single(gathered, message, group=self.peers.group)
        return self.read(to_host(gathered).reshape(size, -1))

    def read(self, table: Ints) -> RoutingCounts:
        """What the expert ranks' messages `[P, .]` say. On the host alone.

        Raises:
            RuntimeError: see `run`.
        """
        layout, ep = self.layout, self.layout.ep
        before = np.concatenate([[0], table[:, 1].cumsum()])
        expected = before[self._last_seen] - before[self._first_seen]
        if not np.array_equal(table[:, 0], expected):
            wrong = np.flatnonzero(table[:, 0] != expected).tolist()
            raise RuntimeError(
                f"ranks {[layout.ranks[rank] for rank in wrong]} have routed tokens otherwise than their "
                "tensor-parallel peers, which hold the same ones. Seed them alike, or turn off the router's noise."
            )
        rows = table[:, 3 : 3 + ep].reshape(ep, layout.etp, ep)
        pairs, ends = table[:, 3 + ep + layout.ep_rank], table[:, 3 + 2 * ep :].sum(0)
        experts = None
        if len(ends):
            first = layout.ep_rank * self.local_experts
            experts = as_ints(np.diff(ends, prepend=0)[first : first + self.local_experts])
        return RoutingCounts(as_ints(table[:, 2]), rows, int(pairs.sum()), experts)


@dataclass(frozen=True)
class RoutingPlan:
    """One call of an all-to-all dispatcher: which rows go where, out to the experts and, summed, back.

    Rows are counted in a buffer: those of the input rows (this rank's batch, or what its expt_tp group gathered) that
    experts here work on, then what was received; or in the inputs themselves, where no rank sends any. "Partial rows"
    are sums over experts on their way back; the first of them go over ep, the rest stay.

    Attributes:
        tokens: T.
        gathers_inputs: rows that each expt_tp peer's share of the inputs is padded to, which are all-gathered over
            expt_tp first; None where the inputs are this rank's batch.
        own_rows: the rows of this rank's batch that it owns.
        local_rows: the input rows that the buffer starts with; None where the inputs are the buffer.
        send_rows: `[sum(input_splits)]`, input rows to send, by ep_rank.
        input_splits, output_splits: rows out and in over ep.
        received: rows of the buffer behind the local ones.
        recv_padding: rows that each expt_tp peer's received rows are padded to, which are all-gathered over expt_tp;
            None where they are not shared.
        rows: `[n]`, the buffer rows that experts here work on.
        num_assignments: a, the (row, local expert) pairs among them.
        partial_rows: `[n]`, the partial row each one is summed into.
        num_partial_rows: of all sums made here.
        reduce_padding: rows of each expt_tp peer's section of the partial rows, which are reduce-scattered over expt_tp
            before they go back; None where each rank keeps its own.
        combine_input_splits, combine_output_splits: partial rows back over ep, none to this rank itself.
        num_own_rows: the rows that sums come back to: this rank's tokens, or those of its expt_tp group.
        staying_rows: `[.]`, which of those have their sum here, behind the sums that go back; None where sums were
            added up in place.
        returned_rows: `[sum(combine_output_splits)]`, which of those each returned sum belongs to.
        reduce_splits: the own rows of each expt_tp peer, to which returned sums are reduce-scattered over expt_tp; None
            where that was done before.
    """

    tokens: int
    gathers_inputs: int | None
    own_rows: range
    local_rows: Tensor | None
    send_rows: Tensor
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    received: int
    recv_padding: int | None
    rows: Tensor
    num_assignments: int
    partial_rows: Tensor
    num_partial_rows: int
    reduce_padding: int | None
    combine_input_splits: tuple[int, ...]
    combine_output_splits: tuple[int, ...]
    num_own_rows: int
    staying_rows: Tensor | None
    returned_rows: Tensor
    reduce_splits: tuple[int, ...] | None
