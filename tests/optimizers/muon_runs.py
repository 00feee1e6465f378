"""Muon in one process of plain DeepSpeed, and on ranks that share each matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_etp
from ds_etp.parallel.process_groups import ProcessGroupInfo
from ds_etp.patches.deepspeed import muon
from tests.oracle import Recipe, Run
from tests.sharded import Layout, ds_config, full_tensors, run_steps, weight


def muon_config(recipe: Recipe, layout: Layout, **params: Any) -> dict[str, Any]:
    """The config of a run with Muon."""
    config = ds_config(recipe, layout)
    config["optimizer"] = {
        "type": "Muon",
        "params": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "torch_adam": True, "ns_method": "gram", **params},
    }
    # DeepSpeed's ZeRO-3 refuses Muon with it.
    config["zero_optimization"]["reduce_scatter"] = layout.stage != 3
    return config


def _start(recipe: Recipe, config: dict[str, Any]) -> Any:
    model = recipe.model().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # One all zeros (gpt_oss's biases) has no gradient's direction to start from that isn't the data's.
            if name.endswith("bias") and not parameter.any():
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    return engine


def train_muon(recipe: Recipe, layout: Layout, **params: Any) -> Run:
    """On this rank's part. Every rank returns the run, in full tensors."""
    ds_etp.register()
    engine = _start(recipe, muon_config(recipe, layout, **params))
    run = run_steps(engine, recipe, layout)
    engine.destroy()
    return run


def train_muon_plain(recipe: Recipe, layout: Layout, **params: Any) -> Run:
    """The same in one process without ds_etp: the ranks' batches are micro batches of one step."""
    ds_etp.register()
    alone = replace(layout, world=1, tp=1, with_block=False)
    config = muon_config(replace(recipe, accumulate=recipe.dp * recipe.accumulate), alone, **params)
    engine = _start(recipe, config)
    run = Run()
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.accumulate):
            for data_rank in range(recipe.dp):
                loss = recipe.compute_loss(engine, recipe.batch(step, micro, data_rank))
                engine.backward(loss)
                total += loss.item() / (recipe.dp * recipe.accumulate)
                engine.step()
        run.losses.append(total)
        norm = engine.get_global_grad_norm()
        run.norms.append(float("nan") if norm is None else float(norm))
    run.weights = full_tensors(engine, weight)
    engine.destroy()
    return run


def overflow(nesterov: bool) -> Any:
    """Momentum and update of a split matrix of this rank's, and of the whole one: with an overflow, and without."""
    from deepspeed.runtime.zero.muon import original_muon

    peers = ProcessGroupInfo(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    split = muon._SplitLayer(0, ((2, 2), (3, 3)), peers)  # two chunks, each over both ranks
    muon._install()
    torch.manual_seed(0)
    grad, momentum = torch.randn(10, 6), torch.randn(10, 6)
    found: list[Any] = [[], [], [], []]
    for entry in (float("inf"), 1.0):
        grad[0, 0] = entry
        moments = [split.take(momentum).clone(), momentum.clone()]
        updates = [
            original_muon.muon_update(split.take(grad).clone(), moments[0], nesterov=nesterov, num_heads=split),
            original_muon.muon_update(grad.clone(), moments[1], nesterov=nesterov),
        ]
        for place, value in enumerate((moments[0], updates[0], split.take(moments[1]), updates[1])):
            found[place].append(value)
        whole = split.gather(updates[0])
        found[1][-1] = whole
    return found
