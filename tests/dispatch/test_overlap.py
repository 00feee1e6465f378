"""What happens while a message travels: events of one training step in their order, and what is sent in all."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.recorder import Recording, record
from ds_etp.experts.sharded import sharded_modules
from ds_etp.log import logger
from ds_etp.parallel.async_ops import AsyncWork
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

RECIPE = Recipe("deepseek_v3")  # its first layer has no experts
STARTED, SHARED, LANDED = "started", "shared experts", "landed"


def log_events(engine: Any, stack: ExitStack) -> list[str]:
    """Has messages that travel, and shared experts, forward and backward, note themselves."""
    events: list[str] = []
    init, wait = AsyncWork.__init__, AsyncWork.wait

    def noting_init(flight: AsyncWork, work: Any, *rest: Any) -> None:
        init(flight, work, *rest)
        if work is not None:
            events.append(STARTED)

    def noting_land(flight: AsyncWork) -> Tensor:
        if flight._work is not None:
            events.append(LANDED)
        return wait(flight)

    stack.enter_context(mock.patch.object(AsyncWork, "__init__", noting_init))
    stack.enter_context(mock.patch.object(AsyncWork, "wait", noting_land))
    for path, module in engine.module.named_modules():
        if path.endswith("shared_experts"):
            module.register_forward_hook(lambda *_: events.append(SHARED))
            # The first of its layers is the last to have gradients.
            module.gate_proj.weight.register_hook(lambda _: events.append(SHARED))
    return events


def one_step(layout: Layout, recipe: Recipe = RECIPE) -> tuple[list[str], list[str], Recording, Tensor, list[str]]:
    """Events forward and backward, everything sent, the logits without gradients, and what was warned of."""
    warnings: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(logger(), "warning", warnings.append))
        engine = make_engine(recipe, layout)
        events = log_events(engine, stack)
        batch = recipe.batch(0, 0, dist.get_rank() // layout.tp)
        with record() as sent:
            loss = engine(**batch).loss
            forward = events.copy()
            engine.backward(loss)
        backward = events[len(forward) :]
        engine.step()
        with torch.no_grad():
            logits = engine.module(input_ids=batch["input_ids"]).logits
        for _, module in sharded_modules(engine.module):
            shared_overlap = module.ds_etp_shard.shared_overlap
            assert shared_overlap is None or (shared_overlap._early is None and shared_overlap._block_input is None)
        engine.destroy()
    return forward, backward, sent, logits, warnings


def check_trace(layout: Layout, back: bool) -> None:
    """With and without."""
    extra = (("expert_tensor_parallel", {"overlap": True}),)
    forward, backward, sent, logits, warnings = one_step(replace(layout, extra=extra))
    plain, _, plainly_sent, plain_logits, _ = one_step(layout)
    layers, during = plain.count(SHARED), [STARTED, SHARED, LANDED]
    assert layers == 1 and STARTED not in plain
    assert forward == during * layers
    assert backward == (during if back else [SHARED]) * layers
    assert sorted(sent.names) == sorted(plainly_sent.names)
    assert sent.bytes == pytest.approx(plainly_sent.bytes)
    assert torch.equal(logits, plain_logits)
    assert warnings == []


def fail_meanwhile(layout: Layout) -> None:
    """A shared expert that fails once: the error comes out, and the next step is as if it hadn't been."""
    extra = (("expert_tensor_parallel", {"overlap": True}),)
    engine = make_engine(RECIPE, replace(layout, extra=extra))
    batch = RECIPE.batch(0, 0, dist.get_rank())
    before = engine(**batch).loss
    shared = engine.module.model.layers[1].mlp.shared_experts
    with mock.patch.object(shared, "forward", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        engine(**batch)
    after = engine(**batch).loss
    assert torch.equal(before, after)
    engine.backward(after)
    engine.destroy()


def test_a_failure_meanwhile_leaves_nothing(launcher: Launcher) -> None:
    launcher.run(4, fail_meanwhile, layout=Layout(world=4, etp=2, ep=2, stage=1, dispatcher="alltoall"))


def no_effect() -> tuple[list[str], list[str]]:
    """What is said of a family that calls shared experts first, and what it does meanwhile."""
    layout = Layout(world=2, ep=2, stage=3, extra=(("expert_tensor_parallel", {"overlap": True}),))
    forward, *_, warnings = one_step(layout, Recipe("qwen2_moe"))
    return forward, warnings


def test_blocks_of_another_kind_are_named(launcher: Launcher) -> None:
    (events, warnings), (_, silence) = launcher.run(2, no_effect)
    assert STARTED not in events
    assert len(warnings) == 1 and silence == []  # rank 0 speaks
    assert warnings[0].startswith("overlap has no effect on model.layers.0.mlp.experts (2 in all): its block calls no")


@pytest.mark.sample("alltoall_etp_first-(1, 2, 2)-3-True", "replicated-(2, 2, 1)-1-False")
@pytest.mark.parametrize(
    ("dispatcher", "split", "stage", "back"),
    [
        ("alltoall", (1, 2, 2), 1, True),
        ("alltoall_etp_first", (1, 2, 2), 3, True),
        ("allgather", (1, 2, 2), 3, True),
        ("replicated", (2, 2, 1), 1, False),
    ],
    ids=str,
)
def test_shared_experts_run_meanwhile(
    launcher: Launcher, dispatcher: str, split: tuple[int, int, int], stage: int, back: bool
) -> None:
    tp, etp, ep = split
    recipe_layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage, dispatcher=dispatcher)
    launcher.run(4, check_trace, layout=recipe_layout, back=back)
