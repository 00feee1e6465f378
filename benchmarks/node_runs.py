"""Short trainings for `node_checks`: their layouts, engines, and in which bits two of them differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import SMALLEST, Case, Shape
from benchmarks.node_layers import device_here
from benchmarks.trainees import batch, build, deepspeed_config

# As large as it takes for kernels to last longer than their launches.
ON_GPUS = Shape(8, 2, hidden=1024, intermediate=512, heads=16, length=512)


def cases_on(world: int) -> list[Case]:
    """Every dispatcher in a layout of `world` ranks, a power of two; tensor-parallel attention last.

    DeepSpeed keeps the tensor-parallel groups of the first engine that has some for the whole process.
    """
    if world == 1:
        return [Case("replicated", "ours", 1, dispatcher="replicated")]
    ep, etp = (world, 1) if world == 2 else (world // 2, 2)
    return [
        Case("allgather", "ours", world, ep=ep, etp=etp, dispatcher="allgather"),
        Case("alltoall", "ours", world, ep=ep, etp=etp, dispatcher="alltoall"),
        Case("alltoall_etp_first", "ours", world, ep=world // 2, etp=2, dispatcher="alltoall_etp_first"),
        Case("replicated", "ours", world, tp=world, ep=ep, etp=etp, dispatcher="replicated"),
    ]


def shape_here() -> tuple[Shape, torch.device]:
    """A model for this rank's device, with a batch that any number of ranks can share."""
    device = device_here()
    shape, sequences = (ON_GPUS, 8) if device.type == "cuda" else (SMALLEST, 2)
    return replace(shape, tokens=shape.length * sequences * dist.get_world_size()), device


def make_engine(shape: Shape, case: Case) -> Any:
    """An engine in bf16 whose attention gives the same bits twice on CUDA: fused ones add up by atomics in backward."""
    import deepspeed

    import ds_etp

    ds_etp.register()
    model = build(shape, case.family).train()
    model.set_attn_implementation("eager")
    config = deepspeed_config(case) | {"bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


def train(engine: Any, shape: Shape, case: Case, steps: range) -> Tensor:
    """The losses `[steps]` of a rank."""
    losses = []
    for step in steps:
        ids = batch(shape, case, step, engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


def state(engine: Any) -> dict[str, Tensor]:
    """The weights of a rank, as they are now."""
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def difference(losses: tuple[Tensor, Tensor], weights: tuple[dict[str, Tensor], dict[str, Tensor]]) -> str:
    """In which bits two runs differ; empty where in none."""
    steps = [step for step, (one, other) in enumerate(zip(*losses, strict=True)) if not torch.equal(one, other)]
    names = [name for name, one in weights[0].items() if not torch.equal(one, weights[1][name])]
    if not steps and not names:
        return ""
    first = f"loss from step {steps[0] + 1} on" if steps else "no loss"
    return f"{first}, {len(names)} of {len(weights[0])} weights" + (f" ({names[0]} first)" if names else "")
