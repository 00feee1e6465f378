"""Trainings that show their routers, and the counts that the unsharded model's routers give in one process."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.recorder import record
from ds_etp.experts.registry import find_experts
from ds_etp.experts.sharded import sharded_modules
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, make_engine, with_options

Counts = dict[str, list[list[int]]]  # by layer, one list of tokens by expert for each report


@dataclass(frozen=True)
class OnlyHead(Recipe):
    """A recipe that trains the output layer alone, and recomputes the decoder all the same."""

    def model(self) -> Any:
        """See `Recipe.model`."""
        model = super().model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name == "lm_head.weight"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


@dataclass
class Watched:
    """A recipe for the oracle that notes what each experts module is called with, outside of backward.

    Attributes:
        recipe: what is trained.
        calls: by layer, the counts of each call.
    """

    recipe: Recipe
    calls: Counts
    watching: bool = False

    def model(self) -> Any:
        """The recipe's model, watched."""
        model = self.recipe.model()
        for path, module in find_experts(model).items():
            experts = getattr(module, "num_experts", None) or len(module.down_proj)
            module.register_forward_pre_hook(partial(self._note, path.removesuffix(".experts"), experts))
        return model

    def _note(self, layer: str, experts: int, module: Any, args: tuple[Any, ...]) -> None:
        if self.watching:
            self.calls.setdefault(layer, []).append(_count(args, experts))

    def compute_loss(self, *args: Any) -> Any:
        """See `Recipe.compute_loss`. What runs again in backward is not in it."""
        self.watching = True
        loss = self.recipe.compute_loss(*args)
        self.watching = False
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recipe, name)


def _count(args: tuple[Any, ...], experts: int) -> list[int]:
    if len(args) == 1:  # called with the tokens of each expert in turn, zeros for those that chose another
        return args[0].view(experts, -1, args[0].shape[-1]).abs().sum(-1).ne(0).sum(1).tolist()
    return [int((args[1] == expert).sum()) for expert in range(experts)]


def unsharded_counts(recipe: Recipe, steps_a_report: int) -> Counts:
    """By layer and report, tokens by expert of the model in one process. Each forward is seen once."""
    watched = Watched(recipe, {})
    train_unsharded.__wrapped__(watched)
    calls = recipe.dp * recipe.accumulate * steps_a_report
    return {
        layer: [
            torch.tensor(counts[start : start + calls]).sum(0).tolist()
            for start in range(0, len(counts) - len(counts) % calls, calls)
        ]
        for layer, counts in watched.calls.items()
    }


def shown(layout: Layout, folder: Path, monitor_router: bool | str = True, **options: Any) -> Layout:
    """A layout whose run writes CSV files into `folder/run` after every second step."""
    layout = with_options(layout, monitor_router=monitor_router, **options)
    monitor = ("csv_monitor", {"enabled": True, "output_path": str(folder), "job_name": "run"})
    return replace(layout, extra=(*layout.extra, monitor, ("steps_per_print", 2)))


def train_shown(recipe: Recipe, layout: Layout, stray: bool = True) -> list[float]:
    """Trains, with forwards in between that nobody trains on. Rows this rank sent in each step's forwards, by step.

    `stray`: whether to run those forwards.
    """
    engine = make_engine(recipe, layout)
    data_rank, sent = dist.get_rank() // (layout.tp * layout.sp), []
    for step in range(recipe.steps):
        sent.append(0.0)
        for micro in range(recipe.accumulate):
            batch = recipe.batch(step, micro, data_rank)
            if stray:
                with torch.no_grad():
                    engine(**batch)  # a reference model's, in training mode
                engine.eval()
                with torch.no_grad():
                    engine(**batch)
                engine.train()
            loss, rows = measured(engine, recipe, batch)
            sent[-1] += rows
            engine.backward(loss)
            engine.step()
    assert not stray or all(module.training for _, module in sharded_modules(engine.module))
    engine.destroy()
    return sent


def measured(engine: Any, recipe: Recipe, batch: dict[str, Any]) -> tuple[Any, float]:
    """The loss of a batch, and the rows that go over the experts' own groups meanwhile."""
    groups = engine.ds_etp.groups
    made = [peers._group for peers in (groups.ep, groups.expt_tp, groups.expert_model_parallel)]
    own = {group.group_name for group in made if group is not None}
    with record() as recording:
        loss = recipe.compute_loss(engine, batch)
    rows = 0.0
    for message in recording.messages:
        if message.group in own:
            # An all-reduce is a merge and a gather over tp in one.
            rows += message.rows / (2 if message.name == "all_reduce" else 1)
    return loss, rows


def written(folder: Path) -> dict[str, list[float]]:
    """The values of each CSV file, by its name."""
    values = {}
    for path in sorted((folder / "run").glob("router*.csv")):
        with path.open(newline="") as file:
            values[path.stem] = [float(row[1]) for row in list(csv.reader(file))[1:]]
    return values
