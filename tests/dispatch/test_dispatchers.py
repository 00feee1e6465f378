"""Every dispatcher in every kind of layout against one process, and the dot-product identity of the all-to-all pair."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ds_etp.dispatch.alltoall import AllToAll, EPFirst
from ds_etp.dispatch.cost import tokens_are_replicated
from ds_etp.dispatch.registry import DISPATCHERS
from ds_etp.parallel.topology import Topology
from tests.dispatch.layers import Tokens, data_rank, expert_groups, make_experts, make_tokens, run_plan, run_whole
from tests.launcher import CaseFailed, Launcher

EXPERTS = 12
# Sums in float64 in another order: a few dozen roundings of 1e-16 on numbers of about 100.
TOLERANCE = 1e-12

# (world, tp, ep, etp). What tensor-parallel peers hold: all tokens of a block, of several expt_tp groups, of one, of
# a part of one; and layouts where groups overlap without one being part of the other.
LAYOUTS = [
    (1, 1, 1, 1),
    (2, 2, 1, 1),
    (2, 1, 1, 2),
    (2, 1, 2, 1),
    (2, 2, 2, 1),
    (4, 4, 2, 2),
    (4, 4, 1, 2),
    (4, 2, 4, 1),
    (4, 2, 2, 2),
    (4, 2, 1, 4),
    (4, 1, 2, 2),
    (4, 1, 1, 2),
    (6, 2, 2, 3),
    (6, 2, 3, 1),
    (6, 3, 2, 1),
    (6, 6, 1, 2),
    (8, 4, 4, 2),
    (8, 2, 2, 4),
    (8, 2, 4, 2),
    (12, 4, 3, 2),
]


def batches(data: int) -> dict[str, Tokens]:
    """The cases of one data-parallel rank: each tells something that can go wrong."""

    def pinned(tokens: Tokens, experts: list[int]) -> Tokens:
        tokens.index = torch.tensor(experts).expand_as(tokens.index).clone()
        return tokens

    return {
        "even": make_tokens(24, 3, EXPERTS, data),
        "uneven": make_tokens(3 + 7 * data, 3, EXPERTS, data),
        "fewer tokens than ranks": make_tokens(1, 2, EXPERTS, data),
        "one batch empty": make_tokens(5 if data else 0, 2, EXPERTS, data),
        "all empty": make_tokens(0, 2, EXPERTS, data),
        "one expert a token": make_tokens(9, 1, EXPERTS, data),
        "all to one expert": pinned(make_tokens(9, 1, EXPERTS, data), [EXPERTS - 1]),
        "two experts for all": pinned(make_tokens(9, 2, EXPERTS, data), [0, 1]),
    }


def check_plans(sizes: tuple[int, int, int]) -> None:
    """Outputs and gradients of every dispatcher that fits, for every batch."""
    tp, ep, etp = sizes
    topology = Topology(dist.get_world_size(), tp=tp, ep=ep, etp=etp)
    matrices = make_experts(EXPERTS, etp)
    with expert_groups(topology) as groups:
        for name, plan_class in DISPATCHERS.items():
            if name == "replicated" and not tokens_are_replicated(topology):
                continue
            dispatcher = plan_class(groups, EXPERTS)
            for case, tokens in batches(data_rank(topology)).items():
                results = zip(run_plan(dispatcher, matrices, tokens), run_whole(matrices, tokens), strict=True)
                for kind, (got, wanted) in zip(("output", "token grad", "weight grad"), results, strict=True):
                    assert got.shape == wanted.shape, f"{name}, {case}: {kind} {got.shape}"
                    error = (got - wanted).abs().max().item() if wanted.numel() else 0.0
                    assert error <= TOLERANCE, f"{name}, {case}: {kind} is off by {error:.1e}"


@pytest.mark.sample(
    "(1, 1, 1, 1)",
    "(2, 1, 2, 1)",
    "(4, 4, 2, 2)",
    "(4, 4, 1, 2)",
    "(4, 2, 2, 2)",
    "(4, 2, 1, 4)",
    "(4, 1, 2, 2)",
    "(6, 3, 2, 1)",
    "(8, 2, 2, 4)",
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_plan(launcher: Launcher, layout: tuple[int, int, int, int]) -> None:
    world, *sizes = layout
    launcher.run(world, check_plans, sizes=tuple(sizes))


def check_identity(sizes: tuple[int, int, int]) -> None:
    """<A x, y> = <x, A' y> for `dispatch` and `combine`, in whole numbers: equal to the bit."""
    tp, ep, etp = sizes
    topology = Topology(dist.get_world_size(), tp=tp, ep=ep, etp=etp)
    with expert_groups(topology) as groups:
        for plan_class in DISPATCHERS.values():
            if not issubclass(plan_class, AllToAll):
                continue
            dispatcher = plan_class(groups, EXPERTS)
            for tokens in batches(data_rank(topology)).values():
                x = tokens.x.mul(4).round()
                dispatched = dispatcher.dispatch_forward(x, tokens.index, tokens.weights)
                route, opened, picked = dispatched.route, dispatched.x, dispatched.weights
                assert torch.equal(route.dispatch(x), opened)
                generator = torch.Generator().manual_seed(dist.get_rank())
                y = torch.randint(-8, 9, opened.shape, generator=generator).double()
                if len(route.partial_rows) == 0:
                    y.zero_()  # the row that stands for none
                back, back_weights = route.combine(y, torch.ones_like(picked))
                products = torch.stack([(opened * y).sum(), (x * back).sum() / tp])  # peers hold one and the same x
                dist.all_reduce(products)
                assert products[0] == products[1]
                # Every (token, expert) pair came to each of the expert's etp parts once.
                assert torch.equal(back_weights, torch.full_like(back_weights, etp))


@pytest.mark.sample("(4, 2, 2, 2)", "(4, 1, 2, 2)")
@pytest.mark.parametrize("layout", [(2, 1, 2, 1), (4, 2, 2, 2), (4, 1, 2, 2), (4, 4, 2, 2), (8, 4, 4, 2)], ids=str)
def test_dispatch_and_combine_are_transposes(launcher: Launcher, layout: tuple[int, int, int, int]) -> None:
    world, *sizes = layout
    launcher.run(world, check_identity, sizes=tuple(sizes))


def route_unlike_peers() -> None:
    """Rank 1 sends its first token elsewhere than rank 0 believes."""
    topology = Topology(4, tp=2, ep=4)
    tokens = make_tokens(8, 1, EXPERTS, data_rank(topology))
    if dist.get_rank() == 1:
        tokens.index[0] = (tokens.index[0] + EXPERTS // 2) % EXPERTS
    with expert_groups(topology) as groups:
        run_plan(EPFirst(groups, EXPERTS), make_experts(EXPERTS, 1), tokens)


def test_peers_that_route_differently_are_stopped(launcher: Launcher) -> None:
    """On every rank of the block, instead of a message that some rank waits for in vain."""
    with pytest.raises(CaseFailed) as info:
        launcher.run(4, route_unlike_peers, timeout=60)
    assert str(info.value).count("have routed tokens otherwise than their tensor-parallel peers") == 4
