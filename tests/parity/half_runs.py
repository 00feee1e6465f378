"""Training in fp16 and under autocast, for the workers: DeepSpeed's CPU accelerator is told that it has fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import deepspeed.runtime.torch_autocast as host_autocast
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_etp.experts.sharded import ShardedExperts
from tests.half import fp16_supported
from tests.oracle import Recipe, Run
from tests.sharded import Layout, full_tensors, make_engine, run_steps, weight


@contextmanager
def autocast_of_this_engine() -> Iterator[None]:
    """DeepSpeed never forgets that some engine of the process had autocast; later cases would get its buckets."""
    try:
        yield
    finally:
        host_autocast.TORCH_AUTOCAST_INITIALIZED = False
        host_autocast.TORCH_AUTOCAST_DTYPE = None


@fp16_supported()
@autocast_of_this_engine()
def train_half(recipe: Recipe, layout: Layout) -> Run | None:
    """As `tests.sharded.train`. Gradients, which DeepSpeed keeps multiplied by the loss scale, are divided by it."""
    engine = make_engine(recipe, layout)
    run = run_steps(engine, recipe, layout)
    scale = engine.optimizer.loss_scale if engine.fp16_enabled() else 1.0
    run.grads = {name: grad / scale for name, grad in run.grads.items()}
    engine.destroy()
    return run if dist.get_rank() == 0 else None


@autocast_of_this_engine()
def expert_comm_dtypes(recipe: Recipe, layout: Layout) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """In what gradients of experts and of routers are sent, of an engine that has trained a step."""
    engine = make_engine(recipe, layout)
    engine.backward(recipe.compute_loss(engine, recipe.batch(0, 0, dist.get_rank())))
    engine.step()
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for name, parameter in engine.module.named_parameters():
        if "mlp" in name:
            dtypes[".experts." in name].add(engine.optimizer.get_param_comm_dtype(parameter))
    engine.destroy()
    return dtypes[True], dtypes[False]


@dataclass
class Overflow:
    """A run with an overflow, as one rank saw it: by step, and the weights at its end, whole.

    Attributes:
        losses: the mean over all ranks.
        scales: the loss scale after the step.
        skipped: skipped steps so far.
        moved: whether any weight of this rank changed.
    """

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def _experts(engine: Any) -> nn.Module:
    layer: nn.Module = engine.module.model.layers[0].mlp.experts
    return layer


@fp16_supported()
def train_with_overflow(recipe: Recipe, layout: Layout, step_of: int, rank_of: int) -> Overflow:
    """Trains; in one step one number of one rank's gradient of an expert weight is infinite."""
    engine = make_engine(recipe, layout)
    assert isinstance(_experts(engine), ShardedExperts) == layout.with_block
    run, now = Overflow(), 0

    def overflow(grad: Tensor) -> Tensor:
        if now != step_of or dist.get_rank() != rank_of:
            return grad
        grad = grad.clone()
        grad.view(-1)[-1] = float("inf")
        return grad

    _experts(engine).down_proj.register_hook(overflow)
    data_rank = dist.get_rank() // layout.tp
    for now in range(recipe.steps):
        before = {name: part.clone() for name, part in _local_weights(engine)}
        loss = recipe.compute_loss(engine, recipe.batch(now, 0, data_rank))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        run.losses.append(total.item() / layout.world)
        run.scales.append(float(engine.optimizer.loss_scale))
        run.skipped.append(engine.skipped_steps)
        run.moved.append(any(not torch.equal(before[name], part) for name, part in _local_weights(engine)))
    run.weights = full_tensors(engine, weight)
    engine.destroy()
    return run


def _local_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of each weight."""
    for name, parameter in engine.module.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter).detach()
