"""Rows that really travel, beside the formulas `auto` goes by: layers recorded on up to 8 ranks, uniform routing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import lcm
from typing import Any

import pytest

from benchmarks.cases import WIRE_LAYOUTS
from benchmarks.recorder import record
from ds_etp.dispatch.cost import choose_dispatcher, comm_volume, megatron_rows, tokens_are_replicated
from ds_etp.dispatch.registry import DISPATCHERS
from ds_etp.parallel.process_groups import ExpertGroups
from ds_etp.parallel.topology import GroupKind, Topology
from tests.dispatch.layers import apply_experts, data_rank, expert_groups, make_experts, make_tokens
from tests.launcher import Launcher

EXPERTS = 64
PER_TOKEN = (2, 4, 8)
OWNED = 2048  # tokens of each rank: chance, and sections padded to the longest, then stay below the 2% allowed
# Those that 8 ranks hold.
LAYOUTS = [sizes for sizes in WIRE_LAYOUTS if lcm(sizes[0], sizes[1] * sizes[2]) <= 8]


def rows_of_every_k(topology: Topology) -> dict[int, Any]:
    """What `rows_of_plans` finds, by experts a token."""
    with expert_groups(topology) as groups:
        return {per_token: rows_of_plans(topology, groups, per_token) for per_token in PER_TOKEN}


def rows_of_plans(topology: Topology, groups: ExpertGroups, per_token: int) -> dict[str, Any]:
    """By dispatcher: rows this rank sends per owned token, forward by group and backward in sum; and collectives.

    The last number is what the dispatcher says that it has sent, for a run's monitor.
    """
    tokens = make_tokens(OWNED * topology.tp, per_token, EXPERTS, data_rank(topology), hidden=2)
    matrices = make_experts(EXPERTS, topology.etp, hidden=2)
    results = {}
    kinds: tuple[GroupKind, ...] = ("expert_model_parallel", "ep", "expt_tp", "tp")
    peers = {kind: getattr(groups, kind).group for kind in kinds}
    names = {group.group_name: kind for kind, group in peers.items() if group is not None}
    for name, plan_class in DISPATCHERS.items():
        if name == "replicated" and not tokens_are_replicated(topology):
            continue
        dispatcher = plan_class(groups, EXPERTS)
        x, weights = tokens.leaves()
        with record() as forward:
            rows = dispatcher.dispatch(x, tokens.index, weights)
            first = groups.ep.index * dispatcher.local_experts
            local = matrices[first : first + dispatcher.local_experts, groups.expt_tp.index]
            y = dispatcher.combine(apply_experts(local, rows.x, rows.index, rows.weights), rows)
        with record() as backward:
            y.sum().backward()
        sent: dict[str, float] = dict.fromkeys(names.values(), 0.0)
        for message in forward.messages:
            # An all-reduce is a merge and a gather over tp in one.
            half = 2 if message.name == "all_reduce" else 1
            sent[names[message.group]] += message.rows / half / OWNED
            sent["tp"] = sent.get("tp", 0.0) + (message.rows / 2 / OWNED if half == 2 else 0.0)
        back = sum(message.rows for message in backward.messages) / OWNED
        said = dispatcher.rows_sent(rows) / OWNED
        results[name] = (sent, back, len(forward.messages) + len(backward.messages), said)
    return results


@pytest.fixture(scope="module")
def recorded(launcher: Launcher) -> Callable[[Topology], list[dict[int, Any]]]:
    """By rank, of every K: one job for each layout."""
    return cache(lambda topology: launcher.run(topology.world, rows_of_every_k, topology=topology))


@pytest.mark.sample("2-(4, 2, 2)", "2-(1, 2, 2)", "2-(2, 2, 4)", "8-(4, 2, 2)", "8-(1, 2, 2)", "8-(2, 2, 4)")
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("per_token", PER_TOKEN)
def test_recorded_rows_equal_the_formula(
    recorded: Callable[[Topology], list[dict[int, Any]]], sizes: tuple[int, int, int], per_token: int
) -> None:
    tp, ep, etp = sizes
    topology = Topology(max(tp, ep * etp), tp=tp, ep=ep, etp=etp)
    by_rank = [of_rank[per_token] for of_rank in recorded(topology)]
    for name in by_rank[0]:
        expected = comm_volume(name, topology, per_token=per_token, experts=EXPERTS)
        for kind, formula in [*expected.rows.items(), ("tp", expected.tp_rows)]:
            recorded = sum(result[name][0].get(kind, 0.0) for result in by_rank) / topology.world
            assert recorded == pytest.approx(formula, rel=0.02), f"{name}: {kind}"
        # Backward is the transpose: the same rows, those that tp gathers included.
        backward = sum(result[name][1] for result in by_rank) / topology.world
        assert backward == pytest.approx(expected.total + expected.tp_rows, rel=0.02), name
        assert {result[name][2] for result in by_rank} == {expected.collectives}, name
        forward = sum(rows for result in by_rank for kind, rows in result[name][0].items() if kind != "tp")
        assert sum(result[name][3] for result in by_rank) == pytest.approx(forward), name
    chosen = choose_dispatcher(topology, per_token=per_token, experts=EXPERTS).dispatcher
    sent = sum(sum(rows for kind, rows in r[chosen][0].items() if kind != "tp") for r in by_rank) / topology.world
    best = min(megatron_rows(name, topology, per_token) for name in ("alltoall", "allgather"))
    assert sent <= best * 1.001
