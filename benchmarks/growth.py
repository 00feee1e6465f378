"""How times grow: one MoE layer with its sizes, groups and plans with the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.cases import Case, Shape, as_json
from benchmarks.timing import Clock
from benchmarks.trainees import make_trainee

WORLDS = (8, 64, 512, 4096)
BASE = Shape(8, 2, layers=1, tokens=1024)


Sweep = tuple[str, int, Shape, Case]


def sweeps(world: int = 2) -> list[Sweep]:
    """What is varied, its value, and the layer that results."""
    base = Case("", "ours", world, ep=world)
    rows = [("T", tokens, replace(BASE, tokens=tokens), base) for tokens in (512, 1024, 2048, 4096)]
    rows += [("E", experts, replace(BASE, experts=experts), base) for experts in (8, 16, 32, 64)]
    rows += [("K", count, replace(BASE, experts=32, per_token=count), base) for count in (1, 2, 4, 8)]
    rows += [("etp", size, BASE, Case("", "ours", 4, etp=size)) for size in (1, 2, 4)]
    rows += [("ep", size, BASE, Case("", "ours", 4, ep=size)) for size in (1, 2, 4)]
    return rows


def layer(shape: dict[str, Any], case: dict[str, Any], folder: str, steps: int) -> list[float]:
    """Seconds of forward and backward of one MoE block, without anything around it."""
    model_shape, model_case = Shape(**shape), Case(**case)
    trainee = make_trainee(model_shape, model_case, folder)
    block = trainee.model.model.layers[0].mlp
    trainee.engine.set_gradient_accumulation_boundary(False)
    tokens = model_shape.tokens // model_case.dp
    hidden = torch.randn(1, tokens, model_shape.hidden, device=trainee.device, requires_grad=True)
    clock = Clock(trainee.device)
    return [clock.seconds(lambda: block(hidden).square().sum().backward()) for _ in range(steps + 1)][1:]


def groups(folder: str, worlds: list[int]) -> list[dict[str, float]]:
    """Seconds to lay out, plan and build the groups of large worlds, and calls for it, on torch's fake process group.

    The fake group sends nothing: this is the work of each rank, without the network's share of it. The groups are
    those of an engine with an all-to-all dispatcher, which has the most.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.group_calls import count_group_calls
    from ds_etp.dispatch.cost import choose_dispatcher
    from ds_etp.parallel.process_groups import ExpertGroups
    from ds_etp.parallel.topology import GROUP_KINDS, Topology

    rows = []
    for world in worlds:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        start = time.perf_counter()
        topology = Topology(world, etp=2, ep=4)
        for kind in GROUP_KINDS:
            topology.groups(kind)
        laid_out = time.perf_counter()
        choose_dispatcher(topology, per_token=8, experts=64, ranks_per_node=8)
        planned = time.perf_counter()
        with count_group_calls() as calls:
            ExpertGroups(topology).destroy()
        built = time.perf_counter()
        rows.append(
            {
                "world": world,
                "layout": laid_out - start,
                "dispatcher": planned - laid_out,
                "groups": built - planned,
                "calls": len(calls),
            }
        )
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # the launch ends with a barrier
    return rows


def layer_rows(run: Any, rows: Sequence[Sweep], steps: int, launches: int) -> list[dict[str, Any]]:
    """A row for every value of a sweep: the median over launches of the medians over steps."""
    samples: dict[int, list[float]] = {}
    for _ in range(launches):
        for place, (_, _, shape, case) in enumerate(rows):
            by_rank = run(case.world, "benchmarks.growth:layer", shape=as_json(shape), case=as_json(case), steps=steps)
            samples.setdefault(place, []).append(median(max(step) for step in zip(*by_rank, strict=True)))
    return [
        {"varied": varied, "value": value, "world": case.world, "seconds": median(samples[place])}
        for place, (varied, value, _, case) in enumerate(rows)
    ]
