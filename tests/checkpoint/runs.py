"""Saving, loading and going on, in worker processes; and the same training unsharded, in one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.checkpoint import api as checkpoints
from ds_etp.checkpoint.format import StoredCheckpoint
from tests.oracle import Recipe
from tests.sharded import Layout, full_tensors, make_engine, weight

BEFORE, AFTER = 2, 3
RECIPE = Recipe(optimizer="adamw")
# An engine that loads begins with other weights than the one that saved.
OTHER_SEED = 99


@dataclass
class Steps:
    """What a few steps did, and what they left: weights and moments by `<state name>/<name>`."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def engine_for(recipe: Recipe, layout: Layout, **arguments: Any) -> Any:
    """An engine; one without our block gets the methods too."""
    return make_engine(replace(recipe, dp=layout.dp), layout, **arguments)


def go(engine: Any, recipe: Recipe, layout: Layout, first: int, count: int) -> Steps:
    """Trains steps `first` to `first + count`."""
    steps, rank = Steps(), dist.get_rank() // layout.tp
    for step in range(first, first + count):
        total = torch.zeros(())
        for micro in range(recipe.accumulate):
            loss = recipe.compute_loss(engine, recipe.batch(step, micro, rank))
            engine.backward(loss)
            total += loss.detach().float() / recipe.accumulate
            engine.step()
        dist.all_reduce(total)
        steps.losses.append(total.item() / layout.world)
        norm = engine.get_global_grad_norm()
        steps.norms.append(0.0 if norm is None else float(norm))
    return steps


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Everything a checkpoint holds, assembled."""
    with StoredCheckpoint.open(folder) as stored:
        return {key: stored.read(key) for key in stored.index.tensors}


def save_after(recipe: Recipe, layout: Layout, folder: str, **arguments: Any) -> None:
    """Trains the first steps and saves."""
    engine = engine_for(recipe, layout)
    go(engine, recipe, layout, 0, BEFORE)
    assert checkpoints.save_checkpoint(engine, folder, **arguments) is True
    engine.destroy()


def load_and_go(recipe: Recipe, layout: Layout, folder: str, again: str) -> Steps:
    """Loads, trains the next steps, and saves again."""
    engine = engine_for(replace(recipe, seed=OTHER_SEED), layout)
    path, client_state = checkpoints.load_checkpoint(engine, folder)
    assert path is not None and client_state == {}
    assert engine.global_steps == BEFORE
    steps = go(engine, recipe, layout, BEFORE, AFTER)
    checkpoints.save_checkpoint(engine, again, tag="again")
    engine.destroy()
    return steps


def resume(recipe: Recipe, layout: Layout, folder: str) -> tuple[Steps, Steps]:
    """Trains on after saving, and once more from the checkpoint: both runs, on every rank."""
    engine = engine_for(recipe, layout)
    go(engine, recipe, layout, 0, BEFORE)
    engine.save_checkpoint(folder)
    uninterrupted = go(engine, recipe, layout, BEFORE, AFTER)
    uninterrupted.tensors = full_tensors(engine, weight)
    engine.destroy()
    engine = engine_for(replace(recipe, seed=OTHER_SEED), layout)
    engine.load_checkpoint(folder)
    resumed = go(engine, recipe, layout, BEFORE, AFTER)
    resumed.tensors = full_tensors(engine, weight)
    engine.destroy()
    return uninterrupted, resumed


@cache
def unsharded(recipe: Recipe, dp_before: int, dp_after: int) -> Steps:
    """The same steps in this process. A layout of another dp sees other batches from the load on."""
    model = recipe.model().train()
    optimizer = recipe.make_optimizer(model.parameters())
    steps = Steps()
    for step in range(BEFORE + AFTER):
        dp = dp_before if step < BEFORE else dp_after
        optimizer.zero_grad()
        total = 0.0
        for micro in range(recipe.accumulate):
            for rank in range(dp):
                loss = recipe.compute_loss(model, recipe.batch(step, micro, rank))
                (loss / (dp * recipe.accumulate)).backward()
                total += loss.item() / (dp * recipe.accumulate)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        if step >= BEFORE:
            steps.losses.append(total)
            steps.norms.append(norm.item())
    for name, parameter in model.named_parameters():
        steps.tensors[f"fp32/{name}"] = parameter.detach().clone()
        for kind, value in optimizer.state[parameter].items():
            if kind != "step":
                steps.tensors[f"{kind}/{name}"] = value.clone()
    return steps
