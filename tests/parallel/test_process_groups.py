"""Process groups on real ranks: what is made, what DeepSpeed is told, who takes it down, and who else goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as host

import ds_etp
from ds_etp.errors import ConfigError
from ds_etp.parallel.process_groups import ExpertGroups, ProcessGroupInfo
from ds_etp.parallel.topology import Topology
from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, make_engine
from tests.tolerances import LOSS, NORM

KINDS = ("expt_tp", "ep", "expert_dp", "expert_model_parallel", "tp")
ENGINE_KINDS = ("expert_dp", "expert_model_parallel", "tp")  # of one whose dispatcher needs no others
HOST_TABLES = (
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
)
EVERY_METHOD = (
    "_do_sanity_check",
    "_configure_tensor_parallel",
    "_configure_distributed_model",
    "_configure_optimizer",
)


# In the workers


@dataclass(frozen=True)
class Seen:
    """What one rank sees of its groups: ranks by kind, and what DeepSpeed's tables say of the entry."""

    ranks: dict[str, tuple[int, ...]]
    table: tuple[tuple[int, ...], tuple[int, ...]]
    sizes: tuple[int, int]
    places: tuple[int, int]
    largest: str


def count_groups() -> int:
    """How many process groups this rank knows."""
    return len(dist.distributed_c10d._world.pg_map)


def host_entries() -> dict[str, list[str]]:
    """The names in each of DeepSpeed's tables of expert groups."""
    return {table: list(getattr(host, table)) for table in HOST_TABLES}


def assert_working(*several: ExpertGroups, kinds: tuple[str, ...] = KINDS) -> None:
    """An all-reduce over every group adds up its ranks, and nobody else's."""
    for groups in several:
        for kind in kinds:
            assert_peers_work(getattr(groups, kind))


def assert_peers_work(peers: ProcessGroupInfo) -> None:
    """The same for one kind."""
    rank = dist.get_rank()
    assert peers.ranks[peers.index] == rank
    if peers.size == 1:
        assert peers.group is None
        return
    assert tuple(dist.get_process_group_ranks(peers.group)) == peers.ranks
    total = torch.tensor(float(2**rank))
    dist.all_reduce(total, group=peers.group)
    assert total.item() == sum(2**other for other in peers.ranks)


def look(topology: Topology) -> Seen:
    """Makes the groups of a topology, tries them, and takes them down."""
    if topology.tp > 1:
        host._init_tp_mesh_device(tensor_model_parallel_size=topology.tp)
    before = count_groups()
    groups = ExpertGroups(topology)
    assert_working(groups)
    name = groups.name
    model_parallel, data_parallel = host._get_expert_parallel_group(name), host._get_expert_data_parallel_group(name)
    assert tuple(dist.get_process_group_ranks(model_parallel)) == groups.expert_model_parallel.ranks
    assert tuple(dist.get_process_group_ranks(data_parallel)) == groups.expert_dp.ranks
    assert host_entries() == {table: [name] for table in HOST_TABLES}
    seen = Seen(
        ranks={kind: getattr(groups, kind).ranks for kind in KINDS},
        table=(
            tuple(host._get_expert_parallel_group_ranks(name)),
            tuple(host._get_expert_data_parallel_group_ranks(name)),
        ),
        sizes=(host._get_expert_parallel_world_size(name), host._get_expert_data_parallel_world_size(name)),
        places=(host._get_expert_parallel_rank(name), host._get_expert_data_parallel_rank(name)),
        largest=host._get_max_expert_size_name(),
    )
    groups.destroy()
    assert host_entries() == {table: [] for table in HOST_TABLES}
    assert count_groups() == before, "process groups are left behind"
    return seen


def look_at_all(topologies: list[Topology]) -> list[Seen]:
    """One after another in one process: DeepSpeed's tensor-parallel groups are made once, so they share tp."""
    return [look(topology) for topology in topologies]


def destroy_and_make_again() -> None:
    """destroy() twice is fine, and the next owner starts from nothing, also with other ranks under the name."""
    before = count_groups()
    groups = ExpertGroups(Topology(4, etp=2))
    groups.destroy()
    groups.destroy()
    assert count_groups() == before
    again = ExpertGroups(Topology(4, etp=2, ep=2))
    assert_working(again)
    again.destroy()
    other = ExpertGroups(Topology(4, etp=2, pp=2))  # ep_size_2 again, expert_dp of other ranks
    assert other.expert_dp.size == 1
    groups.destroy()  # the first owner has nothing left to take from the others
    assert_working(other)
    other.destroy()
    assert count_groups() == before


def share_an_entry() -> None:
    """Two owners with the same ranks: one entry, which the last of them takes down."""
    before = count_groups()
    first = ExpertGroups(Topology(4, etp=2))
    made = count_groups()
    second = ExpertGroups(Topology(4, ep=2))  # other private groups, the same entry
    assert first.name == second.name == "ep_size_2"
    assert second.expert_model_parallel.group is first.expert_model_parallel.group
    assert second.expert_dp.group is first.expert_dp.group
    assert second.ep.group is not first.expt_tp.group
    assert count_groups() == made + 1  # the private ep group; a rank knows only the groups it is in
    first.destroy()
    first.destroy()
    assert_working(second)
    assert host_entries() == {table: ["ep_size_2"] for table in HOST_TABLES}
    third = ExpertGroups(Topology(4, etp=2))
    second.destroy()
    assert_working(third)
    third.destroy()
    assert host_entries() == {table: [] for table in HOST_TABLES}
    assert count_groups() == before


def refused_and_unharmed(topology: Topology, holder: ExpertGroups | None) -> str:
    """The message for a topology whose name is taken, with the tables and groups of the holder left as they were."""
    tables = {table: dict(getattr(host, table)) for table in HOST_TABLES}
    before = count_groups()
    with pytest.raises(ConfigError) as info:
        ExpertGroups(topology)
    assert count_groups() == before
    assert tables == {table: dict(getattr(host, table)) for table in HOST_TABLES}
    if holder is not None:
        assert_working(holder)
    return str(info.value)


def refuse_our_own_for_other_ranks() -> str:
    """The name is held by another engine of ours."""
    first = ExpertGroups(Topology(4, etp=2))
    text = refused_and_unharmed(Topology(4, etp=2, pp=2), first)
    other = ExpertGroups(Topology(4, etp=2, ep=2))  # another name
    assert_working(first, other)
    first.destroy()
    assert_working(other)
    assert host_entries() == {table: ["ep_size_4"] for table in HOST_TABLES}
    other.destroy()
    return text


def refuse_a_foreign_entry() -> str:
    """The name is held by DeepSpeed's own MoE layers, which lay experts out in another order."""
    host._create_expert_and_data_parallel(2)
    foreign = host._get_expert_parallel_group("ep_size_2")
    text = refused_and_unharmed(Topology(4, etp=2), None)
    assert host._get_expert_parallel_group("ep_size_2") is foreign
    total = torch.ones(())
    dist.all_reduce(total, group=foreign)
    assert total.item() == 2
    return text


def train_two_engines(recipes: list[Recipe], layouts: list[Layout]) -> list[list[tuple[float, float]]]:
    """Two engines in one process, a step each in turn; one is destroyed halfway. Loss and norm by engine and step."""
    engines = [make_engine(recipe, layout) for recipe, layout in zip(recipes, layouts, strict=True)]
    assert engines[0].ds_etp.groups.name == engines[1].ds_etp.groups.name
    did: list[list[tuple[float, float]]] = [[], []]
    for step in range(recipes[0].steps):
        if step == recipes[0].steps // 2:
            engines[0].destroy()
            engines[0].destroy()
        for place in range(2) if step < recipes[0].steps // 2 else [1]:
            engine = engines[place]
            loss = engine(**recipes[place].batch(step, 0, dist.get_rank() // layouts[place].tp)).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            did[place].append((total.item() / dist.get_world_size(), float(engine.get_global_grad_norm())))
    assert_working(engines[1].ds_etp.groups, kinds=ENGINE_KINDS)
    engines[1].destroy()
    assert host_entries() == {table: [] for table in HOST_TABLES}
    third = make_engine(recipes[0], layouts[0])
    assert_working(third.ds_etp.groups, kinds=ENGINE_KINDS)
    third.destroy()
    return did


# In pytest


# The three literal examples of the design.
EXAMPLES = [
    Topology(8, tp=4, etp=2, ep=2),
    Topology(8, tp=2, etp=4, ep=2),
    Topology(8, tp=8, etp=2, ep=1),
]
LITERAL: list[dict[str, list[tuple[int, ...]]]] = [
    {
        "expt_tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "ep": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "expert_dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "expert_model_parallel": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "tp": [(0, 1, 2, 3), (4, 5, 6, 7)],
    },
    {
        "expt_tp": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "ep": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "expert_dp": [(rank,) for rank in range(8)],
        "expert_model_parallel": [tuple(range(8))],
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
    },
    {
        "expt_tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "ep": [(rank,) for rank in range(8)],
        "expert_dp": [(0, 2, 4, 6), (1, 3, 5, 7)],
        "expert_model_parallel": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "tp": [tuple(range(8))],
    },
]


@pytest.mark.parametrize(
    ("topology", "literal"), list(zip(EXAMPLES, LITERAL, strict=True)), ids=["etp<tp", "etp>tp", "classic"]
)
def test_literal_examples(launcher: Launcher, topology: Topology, literal: dict[str, list[tuple[int, ...]]]) -> None:
    seen = launcher.run(8, look, topology=topology)
    product = topology.etp * topology.ep
    for kind, groups in literal.items():
        for ranks in groups:
            assert all(seen[rank].ranks[kind] == ranks for rank in ranks), kind
    for rank, one in enumerate(seen):
        model, data = one.ranks["expert_model_parallel"], one.ranks["expert_dp"]
        assert one.table == (model, data)
        assert one.sizes == (product, 8 // product)
        assert one.places == (model.index(rank), data.index(rank))
        assert one.largest == f"ep_size_{product}"  # DeepSpeed parses the number out of the name


def test_every_tiling_of_four_ranks(launcher: Launcher) -> None:
    topologies = [Topology(4, etp=etp, ep=ep) for etp in (1, 2, 4) for ep in (1, 2, 4) if etp * ep <= 4]
    for rank, several in enumerate(launcher.run(4, look_at_all, topologies=topologies)):
        for topology, seen in zip(topologies, several, strict=True):
            assert seen.ranks == {kind: topology.group_of(kind, rank) for kind in KINDS}


def test_destroy_and_make_again(launcher: Launcher) -> None:
    launcher.run(4, destroy_and_make_again)


def test_two_owners_share_the_entry(launcher: Launcher) -> None:
    launcher.run(4, share_an_entry)


@pytest.mark.parametrize("refuse", [refuse_our_own_for_other_ranks, refuse_a_foreign_entry])
def test_a_name_taken_for_other_ranks(launcher: Launcher, refuse: Callable[[], str]) -> None:
    texts = launcher.run(4, refuse)
    assert len(set(texts)) == 1
    assert "needs DeepSpeed's expert group 'ep_size_2' (ep 1 x etp 2 = 2)" in texts[0]
    assert "which a DeepSpeed MoE layer or another engine of this process has" in texts[0]


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_two_engines_side_by_side(launcher: Launcher, stage: int) -> None:
    recipes = [Recipe(seed=seed, dp=2, steps=4) for seed in (7, 8)]
    layouts = [Layout(2, etp=2, stage=stage), Layout(2, ep=2, stage=stage)]
    did = launcher.run(2, train_two_engines, recipes=recipes, layouts=layouts)[0]
    assert [len(steps) for steps in did] == [2, 4]
    for recipe, steps in zip(recipes, did, strict=True):
        oracle = train_unsharded(recipe)
        for (loss, norm), wanted_loss, wanted_norm in zip(steps, oracle.losses, oracle.norms, strict=False):
            assert loss == pytest.approx(wanted_loss, rel=LOSS)
            assert norm == pytest.approx(wanted_norm, rel=NORM)


# The engine class, without ranks


def engine_methods() -> dict[str, Any]:
    """Everything DeepSpeed's engine class holds."""
    return dict(vars(DeepSpeedEngine))


def test_unregister_puts_the_class_back() -> None:
    before = engine_methods()
    ds_etp.register()
    try:
        changed = {name for name, value in vars(DeepSpeedEngine).items() if before.get(name) is not value}
        assert changed == set(EVERY_METHOD)
        once = engine_methods()
        ds_etp.register()
        assert all(value is once[name] for name, value in vars(DeepSpeedEngine).items())
    finally:
        ds_etp.unregister()
    after = engine_methods()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    ds_etp.unregister()
    assert all(value is before[name] for name, value in vars(DeepSpeedEngine).items())
