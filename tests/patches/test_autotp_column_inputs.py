"""Layers that AutoTP splits by columns and that get one tensor sum its gradient in one message."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import torch

from benchmarks.recorder import record
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

TP = Layout(world=2, tp=2, etp=2, stage=0)


def attention_and_shared_experts() -> dict[str, tuple[list[str], bool]]:
    """Messages of backward, and whether the input's gradient is that of the layers by themselves."""
    engine = make_engine(Recipe(family="glm4_moe"), TP)
    block = engine.module.model.layers[-1]
    parents = {"attention": (block.self_attn, "qkv"), "shared experts": (block.mlp.shared_experts, ("gate", "up"))}
    found = {}
    for name, (parent, letters) in parents.items():
        layers = [getattr(parent, f"{letter}_proj") for letter in letters]
        apart, together = (torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2))
        ys = [layer(apart.requires_grad_()) for layer in layers]  # nobody runs their parent: each sends its own
        sum(y.square().sum() for y in ys).backward()

        def run(x: torch.Tensor, layers: Any = layers) -> Any:
            return sum(layer(x).square().sum() for layer in layers)

        parent.forward = run
        loss = parent(together.requires_grad_())
        with record() as backward:
            loss.backward()
        # Two ranks: what differs is the order in which a few numbers are added up.
        found[name] = backward.names, torch.allclose(apart.grad, together.grad, rtol=1e-5, atol=1e-7)
    engine.destroy()
    return found


def held_after_forward() -> tuple[bool, bool]:
    """Whether an input outlives its layers' forward; whether a copied model computes with weights of its own."""
    engine = make_engine(Recipe(), TP)
    attention = engine.module.model.layers[0].self_attn
    seen: list[Any] = []
    attention.q_proj.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    ids = torch.arange(6)[None]
    engine.module(input_ids=ids)
    gc.collect()
    copied = copy.deepcopy(engine.module)
    with torch.no_grad():
        for parameter in copied.model.layers[0].self_attn.parameters():
            parameter.zero_()
    original, other = (model(input_ids=ids).logits for model in (engine.module, copied))
    engine.destroy()
    return seen[0]() is not None, not torch.equal(original, other)


def test_one_message_for_all_layers_of_one_input(launcher: Launcher) -> None:
    for found in launcher.run(2, attention_and_shared_experts):
        assert found == {"attention": (["all_reduce"], True), "shared experts": (["all_reduce"], True)}


def test_nothing_is_held_and_copies_are_their_own(launcher: Launcher) -> None:
    assert launcher.run(2, held_after_forward) == [(False, True)] * 2
