"""How process groups are made: in few calls however large the world, with the caller's timeout, only those in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.group_calls import count_group_calls
from ds_etp.dispatch.cost import choose_dispatcher
from ds_etp.experts.build import private_groups
from ds_etp.parallel.process_groups import PRIVATE_KINDS, ExpertGroups, ProcessGroupInfo, make_group
from ds_etp.parallel.topology import GroupKind, Topology
from ds_etp.patches.torch import subgroups
from ds_etp.patches.torch.subgroups import makes_one_group, new_subgroup_of_all
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.parallel.test_process_groups import assert_working, count_groups
from tests.sharded import Layout, make_engine

OWN_KINDS: tuple[GroupKind, ...] = ("expt_tp", "ep", "expert_model_parallel", "expert_dp")


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process is one of the ranks of a world without the others: torch's fake backend, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def calls_of(topology: Topology, rank: int, private: Sequence[GroupKind]) -> list[str]:
    """The groups that a rank asks for."""
    with as_rank(rank, topology.world), count_group_calls() as calls:
        groups = ExpertGroups(topology, private=private)
        assert dist.get_process_group_ranks(groups.zero_group) == list(groups.expert_dp.ranks)
        groups.destroy()
        assert count_groups() == 1
    return calls


@pytest.mark.parametrize("world", [512, 4096])
@pytest.mark.parametrize(("ep", "etp"), [(8, 4), (64, 8), (4, 2)])
def test_calls_do_not_grow_with_the_world(world: int, ep: int, etp: int) -> None:
    topology = Topology(world, ep=ep, etp=etp)
    data_parallel = "ds_etp_expert_dp" if topology.edp > 1 else "ds_etp_self"
    hosts = {"ds_etp_expert_model_parallel", data_parallel}
    for rank in (0, 5, world - 1):
        assert sorted(calls_of(topology, rank, ())) == sorted(hosts)
        assert sorted(calls_of(topology, rank, PRIVATE_KINDS)) == sorted(hosts | {"ds_etp_expt_tp", "ds_etp_ep"})


def test_groups_of_one_are_one() -> None:
    """DeepSpeed's table wants a group where a rank is alone: one, also where it is alone along both axes."""
    assert calls_of(Topology(512, pp=512), 7, PRIVATE_KINDS) == ["ds_etp_self"]
    # ep 1: no group of ep, and none of one for the table.
    without = ["ds_etp_expert_model_parallel", "ds_etp_expert_dp", "ds_etp_expt_tp"]
    assert calls_of(Topology(512, etp=8), 7, PRIVATE_KINDS) == without
    with as_rank(7, 512), count_group_calls() as calls:
        make_group(Topology(512, tp=2, cp=4), "cp")  # the sequence groups beside AutoTP
    assert calls == ["ds_etp_cp"]


@pytest.mark.compat  # on private functions of torch
def test_members_and_nobody_else_share_a_name() -> None:
    """With gloo the members of a group find each other by its name, in a store that all groups share."""
    topology = Topology(64, tp=2, etp=4, ep=2, pp=2)
    names: dict[GroupKind, dict[str, set[tuple[int, ...]]]] = {kind: {} for kind in OWN_KINDS}
    for rank in range(topology.world):
        with as_rank(rank, topology.world):
            for kind in OWN_KINDS:
                group: Any = make_group(topology, kind)
                ranks = tuple(dist.get_process_group_ranks(group))
                assert dist.get_rank(group) == ranks.index(rank)
                names[kind].setdefault(group.group_name, set()).add(ranks)
    for kind, by_name in names.items():
        assert all(len(several) == 1 for several in by_name.values()), kind
        assert sorted(ranks for several in by_name.values() for ranks in several) == list(topology.groups(kind))
    assert len({name for by_name in names.values() for name in by_name}) == sum(map(len, names.values()))


@pytest.mark.compat
def test_a_bound_device_is_the_groups_too() -> None:
    """Calls are as few, and the device goes on. NCCL would split its communicator; the fake backend has none."""
    with as_rank(3, 512):
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device("cuda:0")
        with count_group_calls() as calls:
            groups = ExpertGroups(Topology(512, etp=8, ep=64))
        made: list[Any] = [groups.ep.group, groups.expt_tp.group, groups.expert_model_parallel.group, groups.zero_group]
        assert len(calls) == len(made)
        assert [group.bound_device_id for group in made] == [world.bound_device_id] * len(made)
        groups.destroy()


def test_a_torch_with_other_functions_makes_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subgroups, "_MAKES_ONE_GROUP", False)
    assert calls_of(Topology(8, etp=2, ep=2), 5, ["ep"]) == [
        *["ds_etp_expert_model_parallel"] * 2,
        *["ds_etp_expert_dp"] * 4,
        *["ds_etp_ep"] * 4,
    ]


# What torch 2.9 has, what 2.14 has, and what would be something else.
OF_2_9 = "group_size, group_rank, global_ranks_in_group, backend, store, group_name, backend_options=None, timeout=None"
OF_2_9 += ", pg_tag=None, device_id=None, group_desc=None"


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        (OF_2_9, True),
        (f"{OF_2_9}, enable_reconfigure=False", True),
        (f"{OF_2_9}, *, communicator", False),
        (OF_2_9.replace("backend, store", "store, backend"), False),
        (OF_2_9.replace("device_id", "device"), False),
    ],
)
def test_what_makes_one_group(parameters: str, fits: bool) -> None:
    assert makes_one_group(eval(f"lambda {parameters}: None")) is fits


@pytest.mark.compat
def test_the_installed_torch_makes_one_group() -> None:
    """A release in the tested range that doesn't fails here, and only calls more often for a user."""
    assert subgroups._MAKES_ONE_GROUP


def test_a_group_that_was_not_made_is_not_the_world() -> None:
    with as_rank(3, 8):
        groups = ExpertGroups(Topology(8, etp=2, ep=2), private=["ep"])
        assert groups.expt_tp.ranks == (2, 3)
        assert groups.expt_tp.index == 1
        assert groups.ep.group is not None
        with pytest.raises(RuntimeError, match=r"no process group was made for ranks \[2, 3\]"):
            dist.all_reduce(torch.ones(1), group=groups.expt_tp.group)
        groups.destroy()


# In the workers


def seconds_of(group: Any) -> float:
    """The timeout of a gloo group."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def see_timeouts() -> list[tuple[str, float]]:
    """Description and timeout of every group of a topology on four ranks; the default group's first."""
    groups = ExpertGroups(Topology(4, etp=2, ep=2))
    made: list[Any] = [groups.expt_tp.group, groups.ep.group, groups.expert_model_parallel.group, groups.zero_group]
    seen = [(group.group_desc, seconds_of(group)) for group in made]
    groups.destroy()
    return [("", seconds_of(dist.group.WORLD)), *seen]


def make_again_with_uneven_company() -> None:
    """Ranks know different numbers of other groups, and the same groups are made and taken down again and again."""
    others = [dist.new_group([0]), dist.new_group([0, 3]), dist.new_group([0, 3])]
    before = count_groups()
    for _ in range(3):
        for topology in (Topology(4, etp=2), Topology(4, ep=2), Topology(4, etp=2, ep=2), Topology(4)):
            groups = ExpertGroups(topology)
            assert_working(groups)
            groups.destroy()
    assert count_groups() == before
    for group in others:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def make_one_by_one() -> None:
    """What backends are left with that make groups together."""
    topology, rank = Topology(4, etp=2), dist.get_rank()
    with count_group_calls() as calls:
        group = new_subgroup_of_all(topology.groups("expt_tp"), "pairs")
    assert calls == ["pairs", "pairs"]
    ranks = topology.group_of("expt_tp", rank)
    info = ProcessGroupInfo(ranks, ranks.index(rank), group)
    assert tuple(dist.get_process_group_ranks(group)) == ranks
    total = torch.tensor(float(2**rank))
    dist.all_reduce(total, group=info.group)
    assert total.item() == sum(2**other for other in ranks)
    assert seconds_of(group) == seconds_of(dist.group.WORLD)
    dist.destroy_process_group(group)


def calls_of_engines(layouts: list[Layout]) -> list[list[str]]:
    """What engines with these layouts ask for, of ours, and a step of each."""
    recipe, found = Recipe(dp=2, steps=1), []
    for layout in layouts:
        with count_group_calls() as calls:
            engine = make_engine(recipe, layout)
        loss = engine(**recipe.batch(0, 0, dist.get_rank())).loss
        engine.backward(loss)
        engine.step()
        engine.destroy()
        found.append(sorted(call for call in calls if str(call).startswith("ds_etp")))
    return found


def stages_differ() -> list[GroupKind]:
    """The first of two pipeline stages has experts, which send over ep and expt_tp; the other has none."""
    choice = choose_dispatcher(Topology(4, etp=2), "alltoall", per_token=2)
    return private_groups([choice] if dist.get_rank() < 2 else [], torch.device("cpu"))


# In pytest


@pytest.mark.compat
def test_the_callers_timeout(launcher: Launcher) -> None:
    for (_, given), *seen in launcher.run(4, see_timeouts):
        assert given == 600  # of the workers; torch's default is 1800
        assert seen == [(f"ds_etp_{kind}", given) for kind in OWN_KINDS[:3]] + [("ds_etp_self", given)]


@pytest.mark.compat
def test_ranks_may_know_other_groups(launcher: Launcher) -> None:
    launcher.run(4, make_again_with_uneven_company, timeout=60)


def test_stages_agree_on_what_to_make(launcher: Launcher) -> None:
    assert launcher.run(4, stages_differ) == [list(PRIVATE_KINDS)] * 4


def test_one_by_one(launcher: Launcher) -> None:
    launcher.run(4, make_one_by_one)


def test_an_engine_makes_what_its_dispatcher_sends_over(launcher: Launcher) -> None:
    layouts = [Layout(2, ep=2, dispatcher=name) for name in ("allgather", "alltoall")]
    layouts += [Layout(2, etp=2, dispatcher="alltoall_etp_first")]
    table = ["ds_etp_expert_model_parallel", "ds_etp_self"]
    for found in launcher.run(2, calls_of_engines, layouts=layouts):
        assert found == [table, sorted([*table, "ds_etp_ep"]), sorted([*table, "ds_etp_expt_tp"])]
