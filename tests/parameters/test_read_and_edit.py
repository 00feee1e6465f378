"""Whole parameters out of a live engine, and changes of them back into it, against the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_etp
from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.parameters.runs import LAYOUTS, Doubled, differing, is_doubled, named, read, weights_of
from tests.sharded import Layout, make_engine, run_steps
from tests.tolerances import assert_equal_runs


def read_edit_train(layout: Layout) -> tuple[list[str], Any]:
    """What was found wrong on this rank, and a training that goes on from the changed weights."""
    family = "qwen3_moe" if layout.ep > 1 else "mixtral"
    recipe = Recipe(family=family, dp=layout.dp, steps=2)
    engine = make_engine(recipe, layout)
    dtype = torch.bfloat16 if layout.dtype == "bf16" else torch.float32
    # DeepSpeed makes the masters from the weights in the type that they compute in.
    start, last = (
        {name: weight.to(dtype).float() for name, weight in weights_of(recipe.model()).items()},
        layout.world - 1,
    )
    factor = 2 + 2**-10 if layout.dtype == "bf16" else 2  # bf16 has no digits for that: only the masters have
    wrong = differing(read(engine), {name: weight.to(dtype) for name, weight in start.items()})
    wrong += differing(read(engine, dtype="fp32"), start)
    to_last = read(engine, to_rank=last)
    if dist.get_rank() == last:
        wrong += differing(to_last, {name: weight.to(dtype) for name, weight in start.items()})
    elif any(tensor is not None for tensor in to_last.values()) or list(to_last) != list(start):
        wrong.append("a tensor on another rank than to_rank")
    for _ in ds_etp.full_parameters(engine):
        break  # after the first: nothing may be left open
    with ds_etp.edit_parameters(engine, modifier_rank=last) as parameters:
        for name, tensor in parameters:
            assert (tensor is not None) == (dist.get_rank() == last)
            if tensor is not None and is_doubled(name):
                tensor.mul_(factor)
    changed = {name: weight * factor if is_doubled(name) else weight for name, weight in start.items()}
    wrong += differing(read(engine), {name: weight.to(dtype) for name, weight in changed.items()})
    wrong += differing(read(engine, dtype="fp32"), changed)
    one = "model.layers.1.mlp.experts.down_proj"
    with ds_etp.edit_parameters(engine, [one]) as parameters:
        for _, tensor in parameters:
            if tensor is not None:
                tensor.mul_(4).div_(4)  # powers of two: the same bits
    wrong += differing(read(engine, names=[one]), {one: changed[one].to(dtype)})
    run = run_steps(engine, recipe, layout) if layout.dtype == "fp32" else None
    if run is not None:
        wrong += differing(read(engine), run.weights)
    engine.destroy()
    return wrong, run if dist.get_rank() == 0 else None


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_read_and_edit(launcher: Launcher, layout: Layout) -> None:
    """Bits of the unsharded model; and an engine trains on from changed weights as an unsharded model does."""
    results = launcher.run(layout.world, read_edit_train, layout=layout)
    assert [wrong for wrong, _ in results] == [[]] * layout.world
    run = results[0][1]
    if run is not None:
        family = "qwen3_moe" if layout.ep > 1 else "mixtral"
        oracle = train_unsharded(Doubled(family=family, dp=layout.dp, steps=2))
        assert_equal_runs(run, oracle)
