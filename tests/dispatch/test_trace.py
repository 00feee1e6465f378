"""What a layer sends, on which group: recorded from torch.distributed while it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.recorder import record
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine


def trace_experts(layout: Layout) -> dict[str, Any]:
    """The messages of one experts module, forward and backward, and the ranks of the groups it may use."""
    engine = make_engine(Recipe(dp=layout.dp), layout)
    experts = engine.module.model.layers[0].mlp.experts
    torch.manual_seed(dist.get_rank() // layout.tp)
    x = torch.randn(8, 32, requires_grad=True)
    weights = torch.rand(8, 2, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
    with record() as forward:
        y = experts(x, index, weights)
    with record() as backward:
        y.sum().backward()
    groups = engine.ds_etp.groups
    ranks = {kind: getattr(groups, kind).ranks for kind in ("tp", "expt_tp", "ep", "expert_model_parallel")}
    engine.destroy()
    sent = {"forward": forward, "backward": backward}
    return {name: [(message.name, message.ranks) for message in r.messages] for name, r in sent.items()} | ranks


def test_experts_merge_on_expt_tp_not_on_tp(launcher: Launcher) -> None:
    """tp 4, etp 2: partial outputs merge over two ranks; the four only share out and collect tokens."""
    for result in launcher.run(4, trace_experts, layout=Layout(world=4, tp=4, etp=2, stage=1)):
        expt_tp, tp = result["expt_tp"], result["tp"]
        assert len(expt_tp) == 2 and len(tp) == 4
        # Merge, then collect every rank's share of tokens. Nothing goes out: the tokens are everywhere.
        assert result["forward"] == [("reduce_scatter", expt_tp), ("all_gather", tp)]
        # Output gradients are everywhere too. Those of the tokens are summed over shards and collected.
        assert result["backward"] == [("reduce_scatter", expt_tp), ("all_gather", tp)]


def test_etp_equal_to_tp_needs_one_message_each_way(launcher: Launcher) -> None:
    """tp 2, etp 2: an all-reduce forward and one backward, as transformers' own tensor parallelism has."""
    for result in launcher.run(2, trace_experts, layout=Layout(world=2, tp=2, etp=2, stage=1)):
        assert result["forward"] == [("all_reduce", result["expt_tp"])]
        assert result["backward"] == [("all_reduce", result["expt_tp"])]


def test_rows_go_over_ep_and_merge_over_expt_tp(launcher: Launcher) -> None:
    """tp 2, etp 2, ep 2, in either order. `all_to_all` and `reduce_scatter` on no other groups."""
    layout = Layout(world=4, tp=2, etp=2, ep=2, stage=1, dispatcher="alltoall")
    for result in launcher.run(4, trace_experts, layout=layout):
        block, ep, expt_tp, tp = (result[kind] for kind in ("expert_model_parallel", "ep", "expt_tp", "tp"))
        out = [("all_to_all", ep), ("all_gather", expt_tp)]
        back = [("reduce_scatter", expt_tp), ("all_to_all", ep), ("all_gather", tp)]
        assert result["forward"] == [("all_gather", block), *out, *back]
        assert result["backward"] == [*out, *back]
    layout = replace(layout, dispatcher="alltoall_etp_first")
    for result in launcher.run(4, trace_experts, layout=layout):
        # Tokens are on the whole expt_tp group already: there is nothing to gather.
        block, ep, expt_tp, tp = (result[kind] for kind in ("expert_model_parallel", "ep", "expt_tp", "tp"))
        both = [("all_to_all", ep), ("all_to_all", ep), ("reduce_scatter", expt_tp), ("all_gather", tp)]
        assert result["forward"] == [("all_gather", block), *both]
        assert result["backward"] == both
