"""Bytes of a pipeline stage in DeepSpeed's own engine, and as planned: states, and activations under way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from torch import Tensor, nn

from ds_etp.parallel.topology import Topology
from ds_etp.planner.configs import read_facts
from ds_etp.planner.job import Job
from ds_etp.planner.memory import _pipeline_stage_memory
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.planner.test_real_activations import CHANGES, FAMILIES, LENGTH, ROWS
from tests.planner.test_real_memory import optimizer_tensors, storages

LAYERS, MICRO_BATCHES = 6, 3
RECIPE = Recipe(
    "mixtral",
    changes=tuple((CHANGES | FAMILIES["mixtral"] | {"num_hidden_layers": LAYERS}).items()),
    implementation="grouped_mm",
)


class Embedding(nn.Module):
    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, ids: Tensor) -> Any:
        return self.tokens(ids)


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        vars(self)["rotary"] = rotary  # not this layer's alone

    def forward(self, x: Tensor) -> Any:
        places = torch.arange(x.shape[1])[None]
        return self.layer(x, position_embeddings=vars(self)["rotary"](x, places), attention_mask=None)


class Head(nn.Module):
    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.norm, self.output = norm, output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.norm(x))


def pipeline() -> Any:
    model: Any = RECIPE.model()
    base = model.model
    return PipelineModule(
        [
            Embedding(base.embed_tokens),
            *(Layer(layer, base.rotary_emb) for layer in base.layers),
            Head(base.norm, model.lm_head),
        ],
        num_stages=2,
        partition_method="parameters",
        loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()),
    )


def held_by_a_stage(stage: int) -> dict[str, int]:
    """This rank's stage, its bytes of weights and optimizer, and what autograd keeps when backward begins."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine: Any = deepspeed.initialize(model=pipeline(), config=config)[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
    kept: dict[int, Tensor] = {}
    found: dict[str, int] = {"stage": engine.stage_id}
    run = dict(engine._INSTRUCTION_MAP)

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run[schedule.ForwardPass](self, *args, **kwargs)

    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        found.setdefault("activations", sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        run[schedule.BackwardPass](self, *args, **kwargs)

    engine._INSTRUCTION_MAP = run | {schedule.ForwardPass: forward, schedule.BackwardPass: backward}
    engine.train_batch(batches())
    kept.clear()
    own = storages(parameter.data for parameter in engine.module.parameters())
    optimizer = storages(optimizer_tensors(engine.optimizer))
    found["parameters"] = sum(own.values())
    found["optimizer"] = sum(size for place, size in optimizer.items() if place not in own)
    engine.destroy()
    del engine
    gc.collect()
    return found


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank() % 2)
    while True:
        ids = torch.randint(0, 96, (ROWS, LENGTH), generator=generator)
        yield ids, ids


@pytest.mark.parametrize("stage", [0, 1])
def test_bytes_of_stages(launcher: Launcher, stage: int) -> None:
    """Weights and optimizer to the byte; activations of all micro batches under way within a tenth."""
    facts = read_facts(RECIPE.model().config.to_dict(), "test")
    job = Job(LENGTH, ROWS, stage, recompute=False, micro_batches=MICRO_BATCHES)
    results = launcher.run(4, held_by_a_stage, stage=stage)
    assert [result["stage"] for result in results] == [0, 0, 1, 1]
    for result in results:
        memory = _pipeline_stage_memory(facts, Topology(4, pp=2), job, result["stage"])
        lines = {line.name: line.bytes for line in memory.lines}
        assert result["parameters"] == lines["parameters"]
        assert result["optimizer"] == lines["optimizer"]
        logits = ROWS * LENGTH * facts.vocab * 4 * result["stage"]  # the log-softmax, in the last stage
        planned = lines["activations"] + lines["dispatch buffers"] + logits
        assert result["activations"] == pytest.approx(planned, rel=0.1)
