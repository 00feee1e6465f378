"""What a layer sends, on which group: recorded from torch.distributed while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_etp import rows
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

_RECORDED = ("all_reduce", "all_to_all_single")


@contextmanager
def recorded() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Every message of this process's experts, as (collective, ranks of its group)."""
    trace: list[tuple[str, tuple[int, ...]]] = []

    def record(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            trace.append((name, tuple(dist.get_process_group_ranks(kwargs["group"]))))
            return original(*args, **kwargs)

        return wrapper

    places = [(dist, name) for name in _RECORDED]
    places += [(rows, "all_gather_single"), (rows, "reduce_scatter_single")]
    originals = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, original in originals:
        setattr(place, name, record(name, original))
    try:
        yield trace
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


def trace_experts(layout: Layout) -> dict[str, Any]:
    """The messages of one experts module, forward and backward, and the ranks of the groups it may use."""
    engine = make_engine(Recipe(dp=layout.dp), layout)
    experts = engine.module.model.layers[0].mlp.experts
    torch.manual_seed(dist.get_rank() // layout.tp)
    x = torch.randn(8, 32, requires_grad=True)
    weights = torch.rand(8, 2, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
    with recorded() as forward:
        y = experts(x, index, weights)
    with recorded() as backward:
        y.sum().backward()
    groups = engine.ds_etp.groups
    ranks = {kind: getattr(groups, kind).ranks for kind in ("tp", "expt_tp", "ep", "expert_model_parallel")}
    engine.destroy()
    return {"forward": forward, "backward": backward, **ranks}


def test_experts_merge_on_expt_tp_not_on_tp(launcher: Launcher) -> None:
    """tp 4, etp 2: partial outputs merge over two ranks; the four only share out and collect tokens."""
    for result in launcher.run(4, trace_experts, layout=Layout(world=4, tp=4, etp=2, stage=1)):
        expt_tp, tp = result["expt_tp"], result["tp"]
        assert len(expt_tp) == 2 and len(tp) == 4
        # Merge, then collect every rank's share of tokens. Nothing goes out: the tokens are everywhere.
        assert result["forward"] == [("reduce_scatter_single", expt_tp), ("all_gather_single", tp)]
        # The transposes, in reverse; then the token gradients, summed over shards and collected.
        assert result["backward"] == [
            ("all_gather_single", expt_tp),
            ("reduce_scatter_single", expt_tp),
            ("all_gather_single", tp),
        ]


def test_etp_equal_to_tp_needs_one_message_each_way(launcher: Launcher) -> None:
    """tp 2, etp 2: an all-reduce forward and one backward, as transformers' own tensor parallelism has."""
    for result in launcher.run(2, trace_experts, layout=Layout(world=2, tp=2, etp=2, stage=1)):
        assert result["forward"] == [("all_reduce", result["expt_tp"])]
        assert result["backward"] == [("all_reduce", result["expt_tp"])]


def test_general_plan_uses_its_own_groups(launcher: Launcher) -> None:
    """tp 2, etp 2, ep 2: rows go over ep, merge over expt_tp; tp shares out and collects tokens."""
    for result in launcher.run(4, trace_experts, layout=Layout(world=4, tp=2, etp=2, ep=2, stage=1)):
        assert Counter(result["forward"]) == Counter(
            [
                ("all_to_all_single", result["ep"]),
                ("all_gather_single", result["expt_tp"]),
                ("reduce_scatter_single", result["expt_tp"]),
                ("all_to_all_single", result["ep"]),
                ("all_gather_single", result["tp"]),
            ]
        )
        merges = [ranks for name, ranks in result["forward"] if name == "reduce_scatter_single"]
        assert merges == [result["expt_tp"]]
