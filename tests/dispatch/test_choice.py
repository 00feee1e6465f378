"""Which dispatcher a job takes: from its nodes, its model and its config, and the same one on every rank."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch.distributed as dist

from ds_etp.parallel.nodes import NodeSize, smallest_node
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

EIGHT = Layout(world=8, tp=4, etp=4, ep=2)
CHANGES = (("num_local_experts", 8), ("num_experts_per_tok", 6))


def chosen(
    layout: Layout, local_sizes: tuple[str, ...], changes: tuple[tuple[str, Any], ...], hosts: tuple[str, ...] = ()
) -> set[str]:
    """The dispatchers of an engine's layers, where each rank's launcher says its own number of ranks per node."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = local_sizes[rank * len(local_sizes) // world]
    with pytest.MonkeyPatch.context() as patch:
        if hosts:
            patch.setattr(socket, "gethostname", lambda: hosts[rank * len(hosts) // world])
        engine = make_engine(Recipe(dp=layout.dp, changes=changes), layout)
    dispatchers = {choice.dispatcher for choice in engine.ds_etp.choices.values()}
    engine.destroy()
    return dispatchers


@pytest.mark.parametrize(
    ("local_sizes", "weight", "dispatcher"),
    [
        (("8",), 8.0, "alltoall_etp_first"),  # one node: the fewest messages
        (("",), 8.0, "alltoall_etp_first"),  # not said: one node
        (("4",), 8.0, "alltoall"),  # two: the fewest rows between them
        (("8", "4"), 8.0, "alltoall"),  # of different sizes: the smaller one, on all ranks
        (("4",), 1.0, "alltoall_etp_first"),  # as fast as inside
    ],
    ids=str,
)
def test_nodes(launcher: Launcher, local_sizes: tuple[str, ...], weight: float, dispatcher: str) -> None:
    layout = Layout(**{**vars(EIGHT), "extra": (("expert_tensor_parallel", {"inter_node_cost": weight}),)})
    results = launcher.run(8, chosen, layout=layout, local_sizes=local_sizes, changes=CHANGES)
    assert results == [{dispatcher}] * 8


@pytest.mark.parametrize(
    ("hosts", "dispatcher"),
    [
        (("one", "two"), "alltoall"),  # srun and mpirun don't say: nodes are told apart by name
        (("one",), "alltoall_etp_first"),
    ],
    ids=str,
)
def test_hosts(launcher: Launcher, hosts: tuple[str, ...], dispatcher: str) -> None:
    results = launcher.run(8, chosen, layout=EIGHT, local_sizes=("",), changes=CHANGES, hosts=hosts)
    assert results == [{dispatcher}] * 8


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        ([("a", "host names", 0)] * 4, NodeSize(4, "host names")),
        ([("a", "host names", 0)] * 4 + [("b", "host names", 0)] * 2, NodeSize(2, "host names")),
        ([("a", "host names", 0), ("b", "host names", 0)] * 2, NodeSize(1, "host names")),
        # A launcher knows better: containers of one node have names of their own.
        ([("a", "LOCAL_SIZE", 2), ("b", "LOCAL_SIZE", 2)], NodeSize(2, "LOCAL_SIZE")),
        ([("a", "LOCAL_WORLD_SIZE", 8), ("b", "LOCAL_WORLD_SIZE", 4)], NodeSize(4, "LOCAL_WORLD_SIZE")),
        ([("a", "LOCAL_SIZE", 3)] * 3 + [("b", "host names", 0)] * 2, NodeSize(2, "host names")),
    ],
    ids=str,
)
def test_smallest_node(ranks: list[tuple[str, str, int]], size: NodeSize) -> None:
    assert smallest_node(ranks) == size


@pytest.mark.parametrize(
    ("split", "per_token", "dispatcher"),
    [((4, 1, 4), 1, "alltoall"), ((4, 1, 4), 6, "replicated"), ((1, 2, 2), 1, "alltoall"), ((1, 2, 2), 6, "allgather")],
    ids=str,
)
def test_the_model_decides_too(
    launcher: Launcher, split: tuple[int, int, int], per_token: int, dispatcher: str
) -> None:
    """K comes from the model: tokens that want few experts are sent to few ranks."""
    tp, etp, ep = split
    changes = (("num_local_experts", 8), ("num_experts_per_tok", per_token))
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep)
    assert launcher.run(4, chosen, layout=layout, local_sizes=("4",), changes=changes) == [{dispatcher}] * 4
