"""Rows by formula, by counting them in random routings, and what `auto` makes of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.cases import WIRE_LAYOUTS
from ds_etp.dispatch.cost import (
    DISPATCHER_NAMES,
    choose_dispatcher,
    comm_volume,
    mean_replicated_ep_ranks,
    megatron_rows,
    prob_ep_rank_hit,
    tokens_are_replicated,
)
from ds_etp.parallel.topology import Topology

OVERLAPPING = [(2, 3, 1), (3, 2, 1), (4, 3, 2), (2, 1, 3)]
EXPERTS = 64
TOKENS = 3000  # of each rank of a block: chance moves the mean of so many by less than the 2% allowed


def layout(tp: int, ep: int, etp: int) -> Topology:
    """The smallest world that both paths tile."""
    world = next(world for world in range(1, 10**4) if world % tp == 0 and world % (ep * etp) == 0)
    return Topology(world, tp=tp, ep=ep, etp=etp)


def fits(dispatcher: str, topology: Topology) -> bool:
    return dispatcher != "replicated" or tokens_are_replicated(topology)


def counted(dispatcher: str, topology: Topology, per_token: int) -> dict[str, float]:
    """Rows a rank sends by group, per owned token, for tokens with random experts: each row looked at by itself.

    A token is followed from its owner to every rank that works on it, and the partial results back.
    """
    ep, etp, tp = topology.ep, topology.etp, topology.tp
    block, world, size = ep * etp, topology.world, EXPERTS // topology.ep
    rng = random.Random(0)
    sent: Counter[str] = Counter()
    tokens = TOKENS // per_token
    for rank in range(world):
        start, place = rank // block * block, rank % block
        e = place // etp
        holders = {peer for peer in range(world) if peer // tp == rank // tp}

        def at(ep_index: int, etp_index: int, start: int = start) -> int:
            return start + ep_index * etp + etp_index

        for _ in range(tokens):
            aims = {expert // size for expert in rng.sample(range(EXPERTS), per_token)}
            if dispatcher in ("replicated", "allgather"):
                others = block - 1
                sent["expert_model_parallel"] += others * (2 if dispatcher == "allgather" else 1)
                continue
            for aim in aims:
                group = [at(aim, lane) for lane in range(etp)]
                here = set(group) <= holders
                if dispatcher == "alltoall":
                    sent["ep"] += (not here and aim != e) + (aim != e)  # out, and one merged row back
                    sent["expt_tp"] += (etp - 1) * (not here) + (etp - 1)
                else:
                    sent["ep"] += etp * (not here and aim != e) + etp * (aim != e)
            if dispatcher == "alltoall_etp_first":
                own = {at(e, lane) for lane in range(etp)}
                sent["expt_tp"] += (etp - 1) * (not own <= holders) + (etp - 1)
    return {kind: count / world / tokens for kind, count in sent.items()}


@pytest.mark.parametrize("per_token", [1, 2, 8])
@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
@pytest.mark.parametrize("sizes", [*WIRE_LAYOUTS, *OVERLAPPING], ids=str)
def test_formulas_count_rows(sizes: tuple[int, int, int], dispatcher: str, per_token: int) -> None:
    topology = layout(*sizes)
    if EXPERTS % topology.ep:
        topology = layout(sizes[0], 2, sizes[2])
    if not fits(dispatcher, topology):
        return
    formula = comm_volume(dispatcher, topology, per_token=per_token, experts=EXPERTS).rows
    rows = counted(dispatcher, topology, per_token)
    for kind, expected in formula.items():
        assert rows.get(kind, 0.0) == pytest.approx(expected, rel=0.02), kind


@pytest.mark.parametrize(("per_token", "least"), [(2, 4), (4, 7), (8, 9)])
@pytest.mark.parametrize("how", ["formula", "counted"])
def test_half_of_megatrons_rows(per_token: int, least: int, how: str) -> None:
    """At most half of its all-to-all dispatcher in so many of eleven layouts, never above its better one."""
    half = 0
    for sizes in WIRE_LAYOUTS:
        topology = layout(*sizes)
        choice = choose_dispatcher(topology, per_token=per_token)
        rows = choice.comm_volume.total
        if how == "counted":
            rows = sum(counted(choice.dispatcher, topology, per_token).values())
        alltoall, allgather = (megatron_rows(name, topology, per_token) for name in ("alltoall", "allgather"))
        half += rows <= alltoall / 2 + 1e-9
        assert rows <= min(alltoall, allgather) + 1e-9, sizes
    assert half >= least


def test_never_above_megatrons_better_dispatcher() -> None:
    """In any layout: tp, ep and etp up to 16, K up to 8, with many experts and with few."""
    sizes = (1, 2, 4, 8, 16)
    for tp in sizes:
        for ep in sizes:
            for etp in sizes:
                topology = layout(tp, ep, etp)
                for per_token in (1, 2, 4, 6, 8):
                    choice = choose_dispatcher(topology, per_token=per_token)
                    best = min(megatron_rows(name, topology, per_token) for name in ("alltoall", "allgather"))
                    assert choice.comm_volume.total <= best + 1e-9, (tp, ep, etp, per_token)


def test_wanted() -> None:
    assert prob_ep_rank_hit(None, 2, 4) == 1 - 0.75**2
    assert prob_ep_rank_hit(4, 1, 4) == 0.25
    assert prob_ep_rank_hit(4, 4, 4) == 1.0  # a token that has all experts goes everywhere
    assert prob_ep_rank_hit(8, 2, 4) == pytest.approx(1 - 15 / 28)
    assert prob_ep_rank_hit(10**4, 2, 4) == pytest.approx(prob_ep_rank_hit(None, 2, 4), rel=1e-3)
    assert prob_ep_rank_hit(7, 3, 1) == 1.0


@pytest.mark.parametrize(
    ("sizes", "near"),
    [
        ((8, 4, 2), 4),  # a tensor-parallel group holds the whole block's tokens
        ((4, 4, 2), 2),
        ((2, 4, 2), 1),
        ((1, 4, 1), 1),  # its own
        ((1, 4, 2), 0),  # its expt_tp peer doesn't have its tokens
        ((2, 2, 4), 0),
        ((2, 3, 1), 5 / 3),  # blocks 012 345 over pairs 01 23 45: ranks 2 and 3 are alone
    ],
    ids=str,
)
def test_near_indices(sizes: tuple[int, int, int], near: float) -> None:
    assert mean_replicated_ep_ranks(layout(*sizes)) == pytest.approx(near)


@pytest.mark.parametrize(
    ("sizes", "per_token", "dispatcher"),
    [
        ((2, 1, 2), 2, "replicated"),
        ((8, 1, 2), 2, "replicated"),
        ((1, 1, 1), 2, "replicated"),
        ((2, 1, 4), 2, "allgather"),  # every token is wanted by every expert rank
        ((1, 2, 2), 4, "allgather"),  # most tokens are
        ((1, 8, 1), 2, "alltoall"),
        ((8, 8, 1), 2, "alltoall"),  # tokens are everywhere, but most results are zero and needn't be sent
        ((4, 2, 2), 8, "replicated"),  # here they aren't
        ((4, 2, 4), 6, "alltoall_etp_first"),  # nearly the same rows, fewer messages
    ],
    ids=str,
)
def test_auto(sizes: tuple[int, int, int], per_token: int, dispatcher: str) -> None:
    assert choose_dispatcher(layout(*sizes), per_token=per_token).dispatcher == dispatcher


def test_peers_of_one_batch_save_a_message() -> None:
    """They know each other's sizes: all others tell them, forward."""
    alone, peers = (comm_volume("allgather", Topology(2, tp=tp, ep=2), per_token=8).collectives for tp in (1, 2))
    assert (alone, peers) == (5, 4 + 2)  # the two of tp


def test_a_slow_network_keeps_rows_inside_nodes() -> None:
    """ep over 2 nodes of 4 ranks: rows over the lanes weigh more, so they are merged before they leave."""
    topology = Topology(8, tp=4, ep=2, etp=4)
    inside = choose_dispatcher(topology, per_token=6)
    across = choose_dispatcher(topology, per_token=6, ranks_per_node=4, inter_node_cost=8)
    assert inside.dispatcher == "alltoall_etp_first"
    assert across.dispatcher == "alltoall"
    assert across.comm_volume.rows["ep"] < inside.comm_volume.rows["ep"]
    assert choose_dispatcher(topology, per_token=6, ranks_per_node=8, inter_node_cost=8).dispatcher == inside.dispatcher
    assert choose_dispatcher(topology, per_token=6, ranks_per_node=4, inter_node_cost=1).dispatcher == inside.dispatcher


def test_a_plan_asked_for_is_taken() -> None:
    for dispatcher in DISPATCHER_NAMES:
        assert choose_dispatcher(Topology(4, tp=4, ep=2, etp=2), dispatcher, per_token=2).dispatcher == dispatcher


def test_bytes() -> None:
    """What the field sends today, in megabytes a layer: 2,048 tokens on four ranks, hidden 512, fp32."""
    one_row = 2 * 512 * 512 * 4
    tp2_etp2 = comm_volume("replicated", Topology(4, tp=2, etp=2), per_token=2, experts=8)
    assert tp2_etp2.bytes(512, 512, 4) == 2 * one_row  # two all-reduces of two ranks' tokens
    assert tp2_etp2.collectives == 2
    ep4 = comm_volume("alltoall", Topology(4, ep=4), per_token=8, experts=32)
    assert ep4.bytes(512, 512, 4) < 0.52 * 25.5e6
    tp2_ep4 = comm_volume("alltoall", Topology(4, tp=2, ep=4), per_token=2, experts=8)
    assert tp2_ep4.bytes(512, 512, 4) < 0.95 * 8.4e6
    assert tp2_ep4.collectives <= 8


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="'ring' is not a dispatcher: replicated, allgather"):
        comm_volume("ring", Topology(1), per_token=1)
    with pytest.raises(ValueError, match="'flex' is not a dispatcher"):
        megatron_rows("flex", Topology(1), 1)
