"""A training that is compiled, in worker processes: conftest.py turns torch.compile off for all other cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_etp
from tests.oracle import Recipe, Run
from tests.sharded import Layout, ds_config, run_steps

_OFF = "TORCHDYNAMO_DISABLE"
OURS = "(reason: ds_etp: "
# What transformers does to return router logits breaks the graph at a place of its own in each layer. One layer, since
# dynamo takes seconds for each.
QUIET = (("output_router_logits", False), ("num_hidden_layers", 1))


@dataclass
class Traced:
    """What dynamo did in one run on one rank.

    Attributes:
        warm_up: how many graphs it had made after the first step.
        graphs: how many after the last one.
        breaks: graph breaks by their reason, over the whole run.
    """

    warm_up: int = 0
    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)

    @property
    def others(self) -> list[str]:
        """Reasons that aren't ds_etp's."""
        return [reason for reason in self.breaks if OURS not in reason]


@contextmanager
def dynamo() -> Iterator[Traced]:
    """Lets torch.compile compile, from an empty cache, and counts."""
    from torch._dynamo.utils import counters

    off = os.environ.pop(_OFF, None)  # read whenever something is to be compiled
    torch._dynamo.reset()
    counters.clear()
    traced = Traced()
    try:
        yield traced
        traced.graphs = graphs()
        traced.breaks = dict(counters["graph_break"])
    finally:
        torch._dynamo.reset()
        if off is not None:
            os.environ[_OFF] = off


def graphs() -> int:
    """How many graphs dynamo has made since `dynamo()`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_layers(engine: Any, backend: str) -> None:
    """The decoder layers one by one, as accelerate's regional compilation does."""
    for module in engine.module.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            module.compile(backend=backend)


def train_compiled(recipe: Recipe, layout: Layout, how: str, backend: str = "eager") -> tuple[Run | None, Traced]:
    """Trains the recipe on this process's rank. Rank 0 returns the run.

    Args:
        recipe: of 2 steps or more; the first warms up.
        layout: how it is split.
        how: what is compiled, and when: `engine`, `before` initialize, `after` it, or `layers`.
        backend: dynamo's.
    """
    ds_etp.register()
    with dynamo() as traced:
        model = recipe.model().train()
        if how == "before":
            model.compile(backend=backend)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, config=ds_config(recipe, layout), model_parameters=trained)
        if how == "engine":
            engine.compile(backend=backend)
        elif how == "after":
            model.compile(backend=backend)
        elif how == "layers":
            compile_layers(engine, backend)
        losses = run_steps(engine, replace(recipe, steps=1), layout)
        traced.warm_up = graphs()
        run = run_steps(engine, recipe, layout, first=1)
        engine.destroy()
    run.losses[:0], run.norms[:0] = losses.losses, losses.norms
    return (run if dist.get_rank() == 0 else None), traced


def compiled_by_itself(recipe: Recipe) -> nn.Module:
    """A model inside torch.compile's own module, which renames every parameter."""
    module: nn.Module = torch.compile(recipe.model(), backend="eager")
    return module
