"""The recipe of an oracle run, trained as the pipeline that `from_causal_lm` makes. Runs in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor

import ds_etp
from tests.oracle import Recipe, Run
from tests.pipeline.runs import full_tensors
from tests.sharded import Layout, ds_config, gradient, weight


@dataclass(frozen=True)
class Padded(Recipe):
    """A recipe whose second row of each batch is padded on the right, its first on the left.

    Attributes:
        positions: whether batches count positions from the first real token.
    """

    padding: tuple[int, ...] = (0, 4, 3, 1)
    positions: bool = False
    accumulate: int = 2

    def batch(self, step: int, micro: int, data_rank: int) -> dict[str, Tensor]:
        """One micro batch `[2, S]`, longer in later steps."""
        # Cut after padding, from the side of the real tokens: later rows of a data set differ in length.
        cut = {0: 3, 1: 1}.get(step, 0)
        rows = super().batch(step, micro, data_rank)
        batch = {name: torch.stack([row[0], row[1].flip(0)])[:, cut // 2 : 12 - cut] for name, row in rows.items()}
        if self.positions:
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return batch


@dataclass(frozen=True)
class Case:
    """How a recipe is trained: what else it is split by, and what `from_causal_lm` is given."""

    layout: Layout
    stages: int = 2
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.layout.dp // self.stages

    def make_module(self, model: Any) -> Any:
        """The pipeline of a model."""
        if self.layout.tp == 1:
            return ds_etp.pipeline.from_causal_lm(model, self.stages, **dict(self.options))
        topology = PipeModelDataParallelTopology(self.stages, self.layout.tp, self.dp)
        return ds_etp.pipeline.from_causal_lm(model, topology=topology, **dict(self.options))


def make_engine(recipe: Recipe, case: Case) -> Any:
    """A PipelineEngine of the recipe's model, ds_etp registered."""
    ds_etp.register()
    module = case.make_module(recipe.model())
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    config = ds_config(recipe, case.layout)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
    inputs = dict(case.options).get("inputs", ("input_ids", "attention_mask"))
    engine.set_batch_fn(partial(ds_etp.pipeline.pipeline_batch, inputs=inputs))
    return engine


def batches(recipe: Recipe, step: int, engine: Any) -> Iterator[dict[str, Tensor]]:
    """The micro batches of one step of this rank's pipeline."""
    for micro in range(recipe.accumulate):
        yield recipe.batch(step, micro, engine.grid.data_parallel_id)


def train(recipe: Recipe, case: Case) -> Run | None:
    """Trains the recipe on this process's rank. Rank 0 returns the run, in full tensors."""
    engine = make_engine(recipe, case)
    run = Run()
    take = engine._take_model_step

    def seen(*args: Any) -> Any:
        run.grads = full_tensors(engine, gradient)
        return take(*args)

    for step in range(recipe.steps):
        if step == recipe.steps - 1:
            engine._take_model_step = seen
        run.losses.append(float(engine.train_batch(batches(recipe, step, engine))))
        run.norms.append(float(engine.get_global_grad_norm()))
    run.weights = full_tensors(engine, weight)
    engine.destroy()
    return run if dist.get_rank() == 0 else None
