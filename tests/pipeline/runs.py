"""The recipe of an oracle run, trained by a real PipelineEngine, gathered to full tensors under their HF names.

Everything here runs in worker processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import ds_etp
from ds_etp.parallel.topology import Topology
from tests.oracle import Recipe, Run
from tests.pipeline.models import make_pipeline
from tests.sharded import Layout, ds_config, expert_layouts, gradient, weight
from tests.tolerances import LOSS, TENSOR


@dataclass(frozen=True)
class Pipeline:
    """How a run is cut into stages.

    Attributes:
        layout: what else it is split by; its `world` counts the ranks of all stages.
        stages: pp.
        cuts, interval: see `make_pipeline`.
    """

    layout: Layout
    stages: int = 2
    cuts: tuple[int, ...] = ()
    interval: int = 0

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.layout.dp // self.stages


def make_engine(recipe: Recipe, pipeline: Pipeline, **arguments: Any) -> Any:
    """A PipelineEngine with the recipe's model, ds_etp registered."""
    ds_etp.register()
    module = make_pipeline(recipe.model(), pipeline.stages, pipeline.cuts, pipeline.interval, pipeline.layout.tp)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    config = ds_config(recipe, pipeline.layout)
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=trained, **arguments)
    return engine


def batches(recipe: Recipe, step: int, engine: Any) -> Any:
    """The micro batches of one step of this rank's pipeline."""
    for micro in range(recipe.accumulate):
        batch = recipe.batch(step, micro, engine.grid.data_parallel_id)
        yield batch["input_ids"], batch["labels"]


def train(recipe: Recipe, pipeline: Pipeline) -> Run | None:
    """Trains the recipe on this process's rank. Rank 0 returns the run, in full tensors."""
    engine = make_engine(recipe, pipeline)
    if pipeline.layout.tp > 1:
        projections = [module for path, module in engine.module.named_modules() if path.endswith("q_proj")]
        assert all(module.weight.shape[0] == 32 // pipeline.layout.tp for module in projections)
    evaluated = float(engine.eval_batch(batches(recipe, 0, engine)))
    run = run_steps(engine, recipe)
    assert abs(evaluated - run.losses[0]) <= LOSS * evaluated  # of the same batches, before the first step
    engine.destroy()
    return run if dist.get_rank() == 0 else None


def run_steps(engine: Any, recipe: Recipe, first: int = 0) -> Run:
    """Trains an engine for the recipe's steps, from the first on, and gathers what it did."""
    run = Run()
    take = engine._take_model_step

    def seen(*args: Any) -> Any:
        run.grads = full_tensors(engine, gradient)
        return take(*args)

    for step in range(first, recipe.steps):
        if step == recipe.steps - 1:
            engine._take_model_step = seen
        run.losses.append(float(engine.train_batch(batches(recipe, step, engine))))
        norm = engine.get_global_grad_norm()
        run.norms.append(float("nan") if norm is None else float(norm))
    engine._take_model_step = take
    run.weights = full_tensors(engine, weight)
    return run


def full_tensors(engine: Any, read: Any) -> dict[str, Tensor]:
    """Every stage's `read` tensors under their Hugging Face names, gathered over etp and ep.

    Asserts on the way that replicas are bit-identical: experts over expert_dp, the rest over a stage, and what
    stages share over these.
    """
    world, stages = dist.get_world_size(), engine.grid.pipe_parallel_size
    topology = engine.ds_etp.topology if "ds_etp" in vars(engine) else Topology(world, pp=stages)
    layouts = expert_layouts(engine.module)
    own = {
        hf_name(engine.module, name): (
            read(parameter).detach().float().cpu().contiguous().numpy(),
            layouts.get(name),
            getattr(parameter, "ds_autotp_universal_checkpoint_meta", {}).get("partition_dim"),
        )
        for name, parameter in engine.module.named_parameters()
    }
    by_rank: list[dict[str, Any]] = [{}] * world
    dist.all_gather_object(by_rank, own)
    full: dict[str, Tensor] = {}
    for ranks in (range(start, start + world // stages) for start in range(0, world, world // stages)):
        for name, (_, layout, dim) in by_rank[ranks[0]].items():
            parts = {rank: torch.from_numpy(by_rank[rank][name][0]) for rank in ranks}
            if layout is None and dim is None:
                _assert_same(name, parts, [tuple(ranks)])
                found = parts[ranks[0]]
            elif layout is None:
                _assert_same(name, parts, [g for g in topology.groups("dp") if g[0] in ranks])
                found = torch.cat([parts[rank] for rank in topology.group_of("tp", ranks[0])], dim)
            else:
                _assert_same(name, parts, [g for g in topology.groups("expert_dp") if g[0] in ranks])
                block = topology.group_of("expert_model_parallel", ranks[0])
                etp = topology.etp
                found = layout.unshard(
                    [[parts[rank] for rank in block[i : i + etp]] for i in range(0, len(block), etp)]
                )
            if name in full:
                # Of more than two, each stage's ranks may add up gradients in another order, in DeepSpeed itself.
                limit = 0 if len(ranks) <= 2 else TENSOR * float(full[name].abs().max())
                assert (found - full[name]).abs().max() <= limit, f"{name} differs between stages"
            full[name] = found
    return full


def _assert_same(name: str, parts: dict[int, Tensor], groups: list[tuple[int, ...]]) -> None:
    for group in groups:
        for rank in group[1:]:
            assert torch.equal(parts[rank], parts[group[0]]), f"{name} differs between the replicas {group}"


def hf_name(module: Any, name: str) -> str:
    """The Hugging Face name of a stage's parameter."""
    for prefix, other in module.hf_names.items():
        if name.startswith(prefix):
            return str(other + name.removeprefix(prefix))
    return name
