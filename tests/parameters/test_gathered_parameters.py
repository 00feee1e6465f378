"""`deepspeed.zero.GatheredParameters` gives whole parameters of split models, and takes edits back into every shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from torch import Tensor

from ds_etp.experts.sharded import LocalShards
from tests.launcher import Launcher
from tests.models import make_batch
from tests.oracle import Recipe
from tests.parameters.runs import LAYOUTS, Doubled, differing, is_doubled, named, read, weights_of
from tests.sharded import Layout, make_engine
from tests.tolerances import TENSOR

ZERO3 = [layout for layout in LAYOUTS if layout.stage == 3]
PERSISTENT = (("zero_optimization", {"stage3_param_persistence_threshold": 10**6}),)
BFLOAT = 5e-2  # the weights are the same bits; bf16 has 8 of them, and layers' sums come in another order


def logits(model: Any) -> Tensor:
    """The answer to one batch, the same on every rank."""
    with torch.no_grad():
        answer: Tensor = model(input_ids=make_batch(99, 0)["input_ids"]).logits.float()
    return answer


def off(got: Tensor, wanted: Tensor) -> float:
    """How far two answers are apart."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def gather_and_edit(layout: Layout) -> tuple[list[str], dict[str, float]]:
    """What was found wrong, and how far answers are from the unsharded model's."""
    family = "qwen3_moe" if layout.ep > 1 else "mixtral"
    engine, last = make_engine(Recipe(family=family, dp=layout.dp), layout), layout.world - 1
    dtype = torch.bfloat16 if layout.dtype == "bf16" else torch.float32
    unsharded, doubled = Recipe(family=family).model().to(dtype), Doubled(family=family).model().to(dtype)
    start, changed = weights_of(unsharded, dtype), weights_of(doubled, dtype)
    seen: dict[str, Tensor] = {}
    wrong = []
    for name, parameter in engine.module.named_parameters():
        of_shard = parameter.ds_shape
        with deepspeed.zero.GatheredParameters(parameter):
            seen[name] = parameter.data.clone()
            if parameter.ds_shape != start[name].shape:  # what weight syncs announce
                wrong.append(f"{name}: {parameter.ds_shape}")
        if parameter.ds_shape != of_shard:
            wrong.append(f"{name}: {parameter.ds_shape} afterwards")
    wrong += differing(seen, start)
    before = {name: parameter.ds_tensor.clone() for name, parameter in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        wrong += differing(weights_of(engine.module, dtype), start)
    after = {name: parameter.ds_tensor for name, parameter in engine.module.named_parameters()}
    wrong += differing(after, before)
    expert = next(parameter for name, parameter in engine.module.named_parameters() if ".experts." in name)
    with deepspeed.zero.GatheredParameters(LocalShards([expert])):
        if expert.shape != expert.ds_shape:
            wrong.append("a shard was asked for")
    answers = {"start": off(logits(engine), logits(unsharded))}
    with unwrap_model_for_generation(engine):
        answers["inside"] = off(logits(engine.module), logits(unsharded))
        wrong += differing(weights_of(engine.module, dtype), start)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=last):
        if dist.get_rank() == last:
            for name, parameter in engine.module.named_parameters():
                if is_doubled(name):
                    parameter.data.mul_(2)
    wrong += differing(read(engine), changed)
    answers["edited"] = off(logits(engine), logits(doubled))
    engine.destroy()
    return wrong, answers


@pytest.mark.parametrize(
    "layout",
    [*ZERO3, replace(ZERO3[-1], dtype="fp32", extra=PERSISTENT)],
    ids=lambda case: named(case) + "-kept" * bool(case.extra),
)
def test_whole_inside_and_edits_in_every_shard(launcher: Launcher, layout: Layout) -> None:
    """For every parameter alone and for all at once; a module that runs inside gives the unsharded model's answer."""
    for wrong, answers in launcher.run(layout.world, gather_and_edit, layout=layout):
        assert wrong == []
        assert all(error <= (BFLOAT if layout.dtype == "bf16" else TENSOR) for error in answers.values()), answers


def copy_between(layout: Layout) -> list[str]:
    """From a split engine to one of plain DeepSpeed, as with a reference model; what was found wrong."""
    engine = make_engine(Doubled(dp=layout.dp), layout)
    other = make_engine(Recipe(dp=layout.world), Layout(layout.world, stage=3, with_block=False))
    pair = list(zip(engine.module.parameters(), other.module.parameters(), strict=True))
    with deepspeed.zero.GatheredParameters([p for both in pair for p in both], modifier_rank=0):
        if dist.get_rank() == 0:
            for source, target in pair:
                target.data.copy_(source.data)
    wanted = weights_of(Doubled().model())
    wrong = differing(read(other), wanted) + differing(read(engine), wanted)
    with pytest.raises(ValueError, match=r"modifier_rank=9 is not one of the 2 ranks"):
        deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=9)
    for one in (engine, other):
        one.destroy()
    return wrong


def test_copy_to_a_reference_model(launcher: Launcher) -> None:
    """Both sides are whole inside, so that a copy on rank 0 is one of the whole model."""
    assert launcher.run(2, copy_between, layout=Layout(2, etp=2, stage=3)) == [[], []]
