"""Rows that are marked instead of picked: no question to the device, and the numbers of the unsharded module."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.dispatch.registry import DISPATCHERS
from ds_etp.experts.registry import read_layout
from ds_etp.experts.sharded import Shard, shard_in_place, uses_sentinels
from ds_etp.parallel.topology import Topology
from ds_etp.patches.transformers.experts_interface import enable_sentinels, skips_sentinels
from tests.dispatch.layers import NoReads, Tokens, data_rank, expert_groups, make_tokens
from tests.launcher import Launcher
from tests.models import make_model
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, train
from tests.tolerances import TENSOR, assert_equal_runs

# Gate and up concatenated; interleaved with biases, transposed; no gate.
FAMILIES = {"qwen3_moe": "model.layers.0.mlp", "gpt_oss": "model.layers.0.mlp", "nemotron_h": "model.layers.1.mixer"}


def run_module(module: Any, tokens: Tokens) -> dict[str, Tensor]:
    """The output, and all gradients."""
    module.zero_grad()
    x, weights = tokens.leaves()
    y = module(x, tokens.index, weights)
    y.backward(tokens.grad)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": y.detach(), "token grad": x.grad, "weight grad": weights.grad, **grads}


def check_layers(name: str, sizes: tuple[int, int, int]) -> None:
    """A layer of each family under each implementation that skips experts, for batches of several kinds."""
    tp, ep, etp = sizes
    topology = Topology(dist.get_world_size(), tp=tp, ep=ep, etp=etp)
    with expert_groups(topology) as groups:
        for family, path in FAMILIES.items():
            whole = make_model(family, implementation="grouped_mm").get_submodule(path).experts
            layout = read_layout("experts", whole)
            module = deepcopy(whole)
            dispatcher = DISPATCHERS[name](groups, layout.num_experts, equal_batches=True)
            assert enable_sentinels(module, topology, layout)
            place = (groups.ep.index, groups.expt_tp.index)
            shard_in_place(module, Shard("experts", layout, topology, *place, dispatcher, skips_sentinels))
            for implementation in ("grouped_mm", "batched_mm", "eager"):
                module.config._experts_implementation = implementation
                assert uses_sentinels(module) == (implementation != "eager")
                for tokens in batches(layout.num_experts, data_rank(topology)):
                    got = run_module(module, tokens)  # checks that batches are equal, too
                    compare(got, run_module(whole, tokens), f"{family}, {implementation}")
                    if uses_sentinels(module):
                        with NoReads() as reads:
                            run_module(module, tokens)
                        assert reads.shapes == 0


def compare(got: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    """Tokens and their gradients: those of weights are compared in training."""
    for kind, value in got.items():
        assert torch.isfinite(value).all(), f"{where}: {kind}"
        if kind in ("output", "token grad", "weight grad") and value.numel():
            error = (value - wanted[kind]).abs().max() / wanted[kind].abs().max().clamp(min=1e-12)
            assert error <= TENSOR, f"{where}: {kind} is off by {error:.1e}"


def batches(experts: int, data: int) -> list[Tokens]:
    """Uniform, all to one rank's experts, and none."""
    made = [make_tokens(count, 2, experts, data, hidden=32) for count in (11, 5, 0)]
    made[1].index = torch.tensor([0, 1]).expand_as(made[1].index).clone()
    for tokens in made:
        tokens.x, tokens.weights, tokens.grad = tokens.x.float(), tokens.weights.float(), tokens.grad.float()
    return made


@pytest.mark.parametrize(("name", "sizes"), [("replicated", (4, 2, 2)), ("allgather", (1, 2, 2))], ids=str)
def test_nothing_is_asked_of_the_device(launcher: Launcher, name: str, sizes: tuple[int, int, int]) -> None:
    launcher.run(4, check_layers, name=name, sizes=sizes)


@pytest.mark.parametrize(
    ("dispatcher", "split", "family", "stage"),
    [("replicated", (4, 1, 2), "gpt_oss", 1), ("allgather", (1, 2, 2), "qwen3_moe", 3)],
    ids=str,
)
def test_training(launcher: Launcher, dispatcher: str, split: tuple[int, int, int], family: str, stage: int) -> None:
    """Uneven batches too, and every gradient: rows that no expert computed hold anything until they are zeroed."""
    tp, etp, ep = split
    extra = (("expert_tensor_parallel", {"static_shapes": True}),)
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage, dispatcher=dispatcher, extra=extra)
    recipe = Recipe(family=family, dp=layout.dp, steps=2, implementation="grouped_mm", lengths=(12, 5, 9, 3))
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))
