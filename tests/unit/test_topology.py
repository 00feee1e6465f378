"""Ranks and groups: the literal examples of the design, and properties over thousands of sizes."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_etp.errors import ConfigError
from ds_etp.parallel.topology import GROUP_KINDS, GroupKind, Topology


def test_etp_smaller_than_tp() -> None:
    topology = Topology(world=8, tp=4, etp=2, ep=2)
    assert topology.groups("expt_tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.groups("expert_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups("expert_model_parallel") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (topology.dp, topology.edp) == (2, 2)


def test_etp_larger_than_tp_spans_two_batches() -> None:
    topology = Topology(world=8, tp=2, etp=4, ep=2)
    assert topology.groups("expt_tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.groups("ep") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups("expert_dp") == tuple((rank,) for rank in range(8))
    assert topology.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert {topology.index_in("dp", rank) for rank in topology.group_of("expt_tp", 0)} == {0, 1}


def test_classic_case_keeps_expert_dp_inside_tp() -> None:
    topology = Topology(world=8, tp=8, etp=2, ep=1)
    assert topology.groups("expt_tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("expert_dp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert topology.groups("tp") == (tuple(range(8)),)


def test_every_axis_at_once() -> None:
    topology = Topology(world=16, tp=2, cp=2, pp=2, etp=4, ep=2)
    assert topology.groups("cp")[:2] == ((0, 2), (1, 3))
    assert topology.groups("dp")[:2] == ((0, 4), (1, 5))
    assert topology.groups("pp")[:2] == ((0, 8), (1, 9))
    assert topology.groups("expert_model_parallel") == (tuple(range(8)), tuple(range(8, 16)))


@pytest.mark.parametrize("size", ["world", "tp", "cp", "pp", "etp", "ep"])
def test_sizes_start_at_one(size: str) -> None:
    with pytest.raises(ConfigError, match=f"{size}=0 is not a size"):
        Topology(**{"world": 8, size: 0})


def test_sizes_must_tile_the_world() -> None:
    with pytest.raises(ConfigError, match="tp 3 x cp 1 x pp 1 = 3 does not divide world 8"):
        Topology(world=8, tp=3)
    with pytest.raises(ConfigError, match="etp 2 x ep 3 x pp 1 = 6 does not divide world 8"):
        Topology(world=8, etp=2, ep=3)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any sizes that tile a world of up to 4 stages of 48 ranks."""
    pp, stage = draw(st.integers(1, 4)), draw(st.integers(1, 48))
    tp = draw(st.sampled_from(divisors(stage)))
    cp = draw(st.sampled_from(divisors(stage // tp)))
    etp = draw(st.sampled_from(divisors(stage)))
    ep = draw(st.sampled_from(divisors(stage // etp)))
    return Topology(world=stage * pp, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(topologies())
def test_properties(topology: Topology) -> None:
    sizes: dict[GroupKind, int] = {
        "tp": topology.tp,
        "cp": topology.cp,
        "dp": topology.dp,
        "pp": topology.pp,
        "expt_tp": topology.etp,
        "ep": topology.ep,
        "expert_dp": topology.edp,
        "expert_model_parallel": topology.etp * topology.ep,
    }
    assert set(sizes) == set(GROUP_KINDS)
    where: dict[GroupKind, dict[int, tuple[int, int]]] = {}  # kind -> rank -> (its group, its place there)
    for kind, size in sizes.items():
        groups = topology.groups(kind)
        assert sorted(chain.from_iterable(groups)) == list(range(topology.world)), f"{kind}: not once each"
        assert {len(group) for group in groups} == {size}, kind
        assert all(list(group) == sorted(group) for group in groups), kind
        where[kind] = {rank: (i, j) for i, group in enumerate(groups) for j, rank in enumerate(group)}

    stage_of = {rank: rank // (topology.world // topology.pp) for rank in range(topology.world)}
    assert all(place == stage_of[rank] for rank, (_, place) in where["pp"].items())
    for kind in ("expt_tp", "ep", "expert_dp", "expert_model_parallel", "tp", "cp", "dp"):
        assert all(len({stage_of[rank] for rank in group}) == 1 for group in topology.groups(kind)), kind

    # A shard is a stage and a place in expert_model_parallel: expert_dp is exactly the ranks that hold one shard.
    holders: dict[tuple[int, int], list[int]] = {}
    for rank in range(topology.world):
        holders.setdefault((stage_of[rank], where["expert_model_parallel"][rank][1]), []).append(rank)
    assert sorted(map(tuple, holders.values())) == sorted(topology.groups("expert_dp"))

    # ep x expt_tp spans expert_model_parallel, expt_tp fastest.
    for group in topology.groups("expert_model_parallel"):
        for place, rank in enumerate(group):
            assert (where["expt_tp"][rank][1], where["ep"][rank][1]) == (place % topology.etp, place // topology.etp)
        assert {rank for member in group for rank in topology.group_of("expt_tp", member)} == set(group)
        assert {rank for member in group for rank in topology.group_of("ep", member)} == set(group)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(topologies())
def test_lookups_agree_with_groups(topology: Topology) -> None:
    for kind in GROUP_KINDS:
        for rank in range(0, topology.world, 7):
            group = topology.group_of(kind, rank)
            assert group in topology.groups(kind)
            assert group[topology.index_in(kind, rank)] == rank
