"""Routing plans of both all-to-all orders on literal numbers, worked out by hand: no process, no collective.

Two expert ranks (ep 2): rank 0's tokens need ep_ranks 0 | 0, 1 | 1, rank 1's 0, 1 | 0. Four (ep 2 x etp 2): rank 0's
need 0 | 1, rank 1's 0, 1, rank 2's 1, rank 3's 0 | 0 | 1.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_etp.dispatch.ep_first import ep_first_plan
from ds_etp.dispatch.etp_first import etp_first_plan
from ds_etp.dispatch.routing_table import RankLayout, RoutingCounts, RoutingPlan
from ds_etp.parallel.topology import Topology


def mask(*tokens: list[int]) -> Tensor:
    """`[t, 2]` of the ep_ranks that each token needs."""
    return torch.tensor([[ep_rank in needed for ep_rank in range(2)] for needed in tokens])


TWO = [mask([0], [0, 1], [1]), mask([0, 1], [0])]
FOUR = [mask([0], [1]), mask([0, 1]), mask([1]), mask([0], [0], [1])]


def counts_of(topology: Topology, masks: list[Tensor]) -> RoutingCounts:
    rows = torch.stack([own.sum(0) for own in masks]).view(topology.ep, topology.etp, topology.ep).numpy()
    return RoutingCounts(tuple(map(len, masks)), rows, 11)  # as many assignments as no plan works out itself


def as_literals(plan: RoutingPlan) -> dict[str, Any]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def layout_of(topology: Topology, rank: int) -> RankLayout:
    return RankLayout(topology, tuple(range(topology.expert_model_parallel)), rank)


def test_two_ranks() -> None:
    """Rank 0 sends rows 1 and 2, and gets both of rank 1's. Sums that go back come first, then one for each token."""
    topology = Topology(2, ep=2)
    plan = ep_first_plan(layout_of(topology, 0), counts_of(topology, TWO), 3, TWO[0])
    assert as_literals(plan) == {
        "tokens": 3,
        "gathers_inputs": None,
        "own_rows": range(0, 3),
        "local_rows": [0, 1],
        "send_rows": [1, 2],
        "input_splits": (0, 2),
        "output_splits": (0, 2),
        "received": 2,
        "recv_padding": None,
        "rows": [0, 1, 2, 3],
        "num_assignments": 11,
        "partial_rows": [2, 3, 0, 1],
        "num_partial_rows": 5,
        "reduce_padding": None,
        "combine_input_splits": (0, 2),
        "combine_output_splits": (0, 2),
        "num_own_rows": 3,
        "staying_rows": None,
        "returned_rows": [1, 2],
        "reduce_splits": None,
    }
    other = ep_first_plan(layout_of(topology, 1), counts_of(topology, TWO), 2, TWO[1])
    assert other.input_splits == other.output_splits == (2, 0)
    assert other.local_rows is not None
    assert (other.local_rows.tolist(), other.rows.tolist()) == ([0], [0, 1, 2])
    assert other.partial_rows.tolist() == [2, 0, 1]


def test_ep_first_with_other_batches_on_expt_tp_peers() -> None:
    """Nobody is TP-local: rank 0 sends to itself too, and its peer's three received rows pad its own one to three."""
    topology = Topology(4, ep=2, etp=2)
    plan = as_literals(ep_first_plan(layout_of(topology, 0), counts_of(topology, FOUR), 2, FOUR[0]))
    assert (plan["send_rows"], plan["input_splits"], plan["output_splits"]) == ([0, 1], (1, 1), (1, 0))
    assert (plan["recv_padding"], plan["received"]) == (3, 6)
    # No row is local. Its own row 0 arrives in row 0; rank 1's token in row 3, rank 3's two in rows 4 and 5.
    assert (plan["local_rows"], plan["rows"]) == ([], [0, 3, 4, 5])
    # Sections of three rows by etp_rank of the owner; in the second rank 3's two, then rank 1's, which stays.
    assert (plan["partial_rows"], plan["num_partial_rows"], plan["reduce_padding"]) == ([0, 5, 3, 4], 6, 3)
    assert (plan["combine_input_splits"], plan["combine_output_splits"]) == ((0, 0), (0, 1))
    assert (plan["staying_rows"], plan["returned_rows"], plan["num_own_rows"]) == ([0], [1], 2)


def test_etp_first_with_other_batches_on_expt_tp_peers() -> None:
    """Two tokens of rank 0 and one of rank 1, padded to two, are gathered; rows 1 and 2 of the four go to ep_rank 1."""
    topology = Topology(4, ep=2, etp=2)
    plan = as_literals(etp_first_plan(layout_of(topology, 0), counts_of(topology, FOUR), 2, torch.cat(FOUR[:2])))
    assert (plan["gathers_inputs"], plan["recv_padding"], plan["reduce_padding"]) == (2, None, None)
    assert (plan["send_rows"], plan["input_splits"], plan["output_splits"]) == ([1, 2], (0, 2), (0, 2))
    assert (plan["local_rows"], plan["rows"]) == ([0, 2], [0, 1, 2, 3])
    assert (plan["partial_rows"], plan["num_partial_rows"]) == ([2, 4, 0, 1], 5)
    assert (plan["returned_rows"], plan["num_own_rows"], plan["reduce_splits"]) == ([1, 2], 3, (2, 1))


@pytest.mark.parametrize("make_plan", [ep_first_plan, etp_first_plan])
def test_tokens_of_tp_local_ranks_are_taken_from_the_batch(make_plan: Any) -> None:
    """tp 2: ranks 0 and 1 hold one batch of three, so only what ep_rank 1 needs of it is sent."""
    topology = Topology(4, tp=2, ep=2, etp=2)
    layout = layout_of(topology, 0)
    assert (layout.tp_local_ranks, layout.tp_local_ep_ranks, layout.all_tp_local) == (range(0, 2), range(0, 1), False)
    plan = as_literals(make_plan(layout, counts_of(topology, FOUR), 3, torch.cat(FOUR[:2])))
    first = make_plan is ep_first_plan
    assert plan["send_rows"] == ([1] if first else [1, 2])  # its own token, or those of both
    assert plan["input_splits"] == ((0, 1) if first else (0, 2))
    assert plan["local_rows"] == [0, 2]
    assert plan["rows"] == ([0, 1, 4, 5] if first else [0, 1, 2, 3])
    assert plan["partial_rows"] == ([0, 5, 3, 4] if first else [2, 4, 0, 1])


def test_nothing_is_sent_where_all_ranks_are_tp_local() -> None:
    topology = Topology(4, tp=4, ep=2, etp=2)
    for make_plan in (ep_first_plan, etp_first_plan):
        plan = make_plan(layout_of(topology, 2), counts_of(topology, FOUR), 7, torch.cat(FOUR))
        assert (plan.local_rows, plan.received, sum(plan.input_splits), sum(plan.output_splits)) == (None, 0, 0, 0)
        assert plan.rows.tolist() == [1, 2, 3, 6]  # of seven tokens, those that need ep_rank 1
