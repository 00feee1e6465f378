"""Copies that tensor-parallel ranks hold alike are found where they have drifted, and put right, states and all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_etp.patches.deepspeed import tp_replica_sync
from ds_etp.patches.deepspeed.optimizer_states import DeepSpeedStates
from ds_etp.patches.deepspeed.tp_replica_sync import copies, fingerprints, replicated_tensors
from tests.launcher import Launcher
from tests.oracle import Recipe, Run, train_unsharded
from tests.sharded import Layout, make_engine, run_steps, with_options
from tests.tolerances import assert_equal_runs

RECIPE = Recipe(dp=2, optimizer="adamw", steps=6)
ROUTER = "model.layers.1.mlp.gate.weight"


def kept(engine: Any) -> dict[str, list[torch.Tensor]]:
    """What this rank keeps of each tensor that tensor-parallel ranks hold alike: weights, masters and states."""
    states, tensors = DeepSpeedStates(engine), {}
    for name, tensor in replicated_tensors(engine.module):
        tensors[name] = copies(tensor)
        state: Any = states.param_state(tensor) if isinstance(tensor, torch.nn.Parameter) else None
        if state is not None and state.optimizer_tensor is not None and state.is_local:
            tensors[name] += [state.local_part(kind) for kind in ("fp32", "exp_avg", "exp_avg_sq")]
    return tensors


def drifted(engine: Any) -> set[str]:
    """The names of what differs between tensor-parallel ranks anywhere."""
    own = {name: [part.float().numpy().tobytes() for part in parts] for name, parts in kept(engine).items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name for a, b in zip(everyone[::2], everyone[1::2], strict=True) for name in a if a[name] != b[name]}


def nudge(engine: Any) -> None:
    """Moves the second router of tensor-parallel index 1 by one unit in the last place, and its states."""
    for part in kept(engine)[ROUTER] if dist.get_rank() % 2 else ():
        first = part.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, 9)))


def train_nudged(layout: Layout) -> tuple[Run, list[set[str]], list[list[str]]]:
    """Three steps, the nudge, three more; a check after every second. What had drifted by then, and was found."""
    found: list[list[str]] = []
    original = tp_replica_sync.compare_and_repair

    def watched(engine: Any, tp: Any) -> list[str]:
        found.append(original(engine, tp))
        return found[-1]

    tp_replica_sync.compare_and_repair = watched
    try:
        engine = make_engine(RECIPE, layout)
        run = run_steps(engine, replace(RECIPE, steps=3), layout)
        nudge(engine)
        states = [drifted(engine)]
        engine.backward(RECIPE.compute_loss(engine, RECIPE.batch(3, 0, dist.get_rank() // 2)))
        engine.step()
        states.append(drifted(engine))
        if not states[-1]:
            last = run_steps(engine, RECIPE, layout, first=4)  # asserts that replicas are alike
            run = replace(last, losses=run.losses + last.losses, norms=run.norms + last.norms)
            states.append(drifted(engine))
        engine.destroy()
        return run, states, found
    finally:
        tp_replica_sync.compare_and_repair = original


@pytest.mark.sample("1-bf16", "3-fp32")
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_one_bit_of_one_router(launcher: Launcher, stage: int, dtype: str) -> None:
    """Found at the next check, repaired, and alike afterwards; the run is that of one process."""
    layout = with_options(Layout(world=4, tp=2, etp=2, stage=stage, dtype=dtype), etp_size=2, replica_check_interval=2)
    results = launcher.run(4, train_nudged, layout=layout)
    assert {name for _, _, found in results for name in found[1]} >= {ROUTER}
    for rank, (run, states, found) in enumerate(results):
        assert states == [{ROUTER}, set(), set()] and found[0] == found[2] == []
        if dtype == "fp32" and rank == 0:
            oracle = train_unsharded(RECIPE)
            skipped = replace(
                oracle, losses=oracle.losses[:3] + oracle.losses[4:], norms=oracle.norms[:3] + oracle.norms[4:]
            )
            assert_equal_runs(run, skipped)


def test_without_the_check(launcher: Launcher) -> None:
    """The drift stays."""
    layout = with_options(Layout(world=4, tp=2, etp=2), etp_size=2, replica_check_interval=0)
    _, states, found = launcher.run(4, train_nudged, layout=layout)[0]
    assert states[1] and not found


def test_fingerprints() -> None:
    """Any bit counts, and the place of each."""
    torch.manual_seed(0)
    tensor = torch.randn(5000, dtype=torch.bfloat16)
    other, swapped, negative = tensor.clone(), tensor.clone(), tensor.clone()
    other[4999] = torch.nextafter(other[4999], torch.tensor(9.0, dtype=torch.bfloat16))
    swapped[[1, 2]] = tensor[[2, 1]]
    negative[7], tensor[7] = -0.0, 0.0
    lists = [[tensor], [other], [swapped], [negative], [tensor[:2500], tensor[2500:]], [tensor.clone()]]
    numbers = fingerprints(lists, torch.device("cpu")).tolist()
    assert len(set(numbers[:4])) == 4 and numbers[5] == numbers[0]
