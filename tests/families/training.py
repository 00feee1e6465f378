"""One family trained unsharded and on several splits, compared in the workers. Runs on every rank of a case."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_etp
from ds_etp.experts.sharded import sharded_modules
from tests.families.discover import Family, families, family
from tests.families.tiny import compute_loss, make_batch, make_tiny
from tests.oracle import Recipe, Run
from tests.sharded import Layout, ds_config, full_tensors, gradient, weight
from tests.tolerances import LOSS, NORM

BATCHES = 4
STEPS = 2
CLIP = 0.5
# (ranks, etp, ep, ZeRO stage) by experts implementation. Families take turns: each is split inside under one
# implementation, inside and among ranks under the other; those with one implementation are split in both ways.
SPLITS = (
    {"eager": [(2, 2, 1, 1)], "grouped_mm": [(4, 2, 2, 2)]},
    {"eager": [(4, 2, 2, 3)], "grouped_mm": [(2, 2, 1, 0)]},
)
UNDECORATED = {"eager": [(2, 2, 1, 1), (4, 2, 2, 3)]}
# fp32, against the tensor's largest entry or a thousandth of the whole gradient: some gradients are sums that cancel.
# How these round differs between processors too: by 1.2e-5 from one to another.
TENSOR = 2e-5
FLOOR = 1e-3
# Parameters that rounding moves by more, in one process too: after weights were moved by 1e-7, the gradient was off by
# this much. By family: a pattern of names, and limits for them and for the norm.
MOVED = {
    "hy_v4": (r"attn_hc\.scale$", 4e-5, NORM),
    "hy_v4_vl": (r"hc_scale$|attn_hc\.scale$", 5e-5, NORM),
    "inkling": (r"gate\.global_scale$", 4e-5, NORM),
    "inkling2_loop": (r"q_proj\.linear$", 4e-5, 4e-6),
    "qwen3_5_moe": (r"linear_attn\.A_log$", 7e-5, NORM),
    "qwen3_next": (r"linear_attn\.A_log$", 7e-5, NORM),
}


@cache
def train_unsharded(kind: Family) -> Run:
    """The family in plain PyTorch, in this process, on the batches of all data-parallel ranks."""
    model = make_tiny(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = Run()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for number in range(BATCHES):
            loss = compute_loss(model, make_batch(kind, step, number))
            (loss / BATCHES).backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        run.grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        run.losses.append(sum(losses) / BATCHES)
        run.norms.append(torch.stack([grad.norm() for grad in run.grads.values()]).norm().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    run.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return run


def train_split(kind: Family, implementation: str, etp: int, ep: int, stage: int) -> Run:
    """The same by an engine, gathered to full tensors. Two ranks have two batches each."""
    world, rank = dist.get_world_size(), dist.get_rank()
    micro = BATCHES // world
    recipe = Recipe(steps=STEPS, clip=CLIP, accumulate=micro)
    model = make_tiny(kind, implementation=implementation)
    config = ds_config(recipe, Layout(world, etp=etp, ep=ep, stage=stage))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if kind.decorated:
        used = {module.config._experts_implementation for _, module in sharded_modules(engine.module)}
        assert used == {implementation}
    run = Run()
    for step in range(STEPS):
        total = torch.zeros((), device=engine.device)
        for number in range(micro):
            batch = {
                name: value.to(engine.device) for name, value in make_batch(kind, step, rank * micro + number).items()
            }
            loss = compute_loss(engine, batch)
            engine.backward(loss)
            total += loss.detach() / micro
            if step == STEPS - 1 and number == micro - 1:
                run.grads = full_tensors(engine, gradient)
            engine.step()
        dist.all_reduce(total)
        run.losses.append(total.item() / world)
        run.norms.append(float(engine.get_global_grad_norm()))
    run.weights = full_tensors(engine, weight)
    engine.destroy()
    return run


def compare(name: str) -> list[str]:
    """Trains one family in every way that this many ranks are for. Rank 0 returns what is off."""
    kind = family(name)
    ds_etp.register()
    faults = []
    turn = SPLITS[families().index(kind) % len(SPLITS)]
    for implementation, splits in (turn if kind.decorated else UNDECORATED).items():
        for world, etp, ep, stage in splits:
            if world != dist.get_world_size():
                continue
            run = train_split(kind, implementation, etp, ep, stage)
            if dist.get_rank() == 0:
                label = f"{name} {implementation} etp {etp} ep {ep} ZeRO-{stage}"
                faults += [f"{label}: {fault}" for fault in differences(name, run, train_unsharded(kind))]
    return faults


def differences(name: str, run: Run, oracle: Run) -> list[str]:
    """What of a run differs from the unsharded one by more than rounding, in words."""
    found = []
    pattern, moved, norm = MOVED.get(name, (r"$^", TENSOR, NORM))
    scalars = [("loss", run.losses, oracle.losses, LOSS), ("norm", run.norms, oracle.norms, norm)]
    for kind, got, wanted, tolerance in scalars:
        for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
            if not abs(a - b) <= tolerance * abs(b):
                found.append(f"{kind} of step {step} is {a} instead of {b}")
    floor = FLOOR * oracle.norms[-1]
    for kind, tensors, references in (("gradient", run.grads, oracle.grads), ("weight", run.weights, oracle.weights)):
        if set(tensors) != set(references):
            found.append(f"other names: {set(tensors) ^ set(references)}")
            continue
        for parameter, reference in references.items():
            if tensors[parameter].shape != reference.shape:
                found.append(f"{kind} of {parameter} has shape {tuple(tensors[parameter].shape)}")
                continue
            if reference.numel() == 0:
                continue
            scale = max(reference.abs().max().item(), floor)
            error = (tensors[parameter] - reference).abs().max().item() / scale
            if not error <= (moved if re.search(pattern, parameter) else TENSOR):
                found.append(f"{kind} of {parameter} is off by {error:.1e}")
    return found


def refusal(name: str) -> str:
    """What `deepspeed.initialize` says of a family that can't be split."""
    ds_etp.register()
    model: Any = make_tiny(family(name))
    try:
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=ds_config(Recipe(), Layout(dist.get_world_size(), etp=2)),
        )
    except ds_etp.ConfigError as error:
        return str(error)
    return ""
