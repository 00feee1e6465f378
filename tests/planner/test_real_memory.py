"""The planner's bytes against those of real engines: parameters, gradients and optimizer states, per rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_etp.parallel.topology import Topology
from ds_etp.planner.configs import read_facts
from ds_etp.planner.job import Job
from ds_etp.planner.memory import states
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

# Large enough that weights outweigh everything else in the process that a run leaves behind.
CHANGES = (("num_hidden_layers", 4), ("intermediate_size", 256), ("num_local_experts", 8), ("hidden_size", 64))
BUCKET = 50_000
RECIPE = Recipe(changes=CHANGES, optimizer="adamw")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Workers of its own: what earlier cases of the session's workers left behind would be counted."""
    pool = Launcher()
    yield pool
    pool.close()


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage: many tensors are views of one flat buffer."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.untyped_storage().nbytes()
    }


def live() -> Iterator[Tensor]:
    gc.collect()
    return (item for item in gc.get_objects() if type(item) in (Tensor, torch.nn.Parameter))


def held_bytes(layout: Layout, most: int) -> dict[str, int]:
    """Bytes this rank holds between backward and step, once the optimizer has its states.

    Gloo's own threads let go of what they have sent a moment after the call that sent it: what is neither weights nor
    optimizer gets some time to come down to `most` bytes.
    """
    before = storages(live())
    engine = make_engine(RECIPE, layout)
    for step in range(2):
        engine.backward(RECIPE.compute_loss(engine, RECIPE.batch(step, 0, 0), []))
        if step == 0:
            engine.step()
    weights = storages(p.ds_tensor if hasattr(p, "ds_tensor") else p.data for p in engine.module.parameters())
    optimizer = storages(optimizer_tensors(engine.optimizer))
    for _ in range(50):
        others = {place: size for place, size in storages(live()).items() if place not in {*before, *weights}}
        rest = sum(size for place, size in others.items() if place not in optimizer)
        if rest <= most:
            break
        time.sleep(0.1)
    held = {
        "parameters": sum(weights.values()),
        "optimizer": sum(size for place, size in optimizer.items() if place not in weights),
        "rest": rest,
    }
    engine.destroy()
    return held


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Moments, and the fp32 copies they are of."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
    if inner is not optimizer:
        yield from (parameter for group in inner.param_groups for parameter in group["params"])
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
            yield from getattr(optimizer, name, [])


LAYOUTS = [
    *(Layout(world=2, etp=2, stage=stage, dtype=dtype) for stage in range(4) for dtype in ("fp32", "bf16")),
    *(Layout(world=2, tp=2, ep=2, stage=stage) for stage in (0, 1)),
    *(Layout(world=2, stage=stage, dtype="bf16") for stage in (1, 2, 3)),  # experts partitioned too
]


@pytest.mark.sample(0, 3, 5, 6, 9, 12)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_of_states(launcher: Launcher, layout: Layout) -> None:
    """Parameters and optimizer to the byte. Gradients, and with them the sum, within what the engine rounds up."""
    facts = read_facts(RECIPE.model().config.to_dict(), "test")
    topology = Topology(layout.world, tp=layout.tp, etp=layout.etp, ep=layout.ep)
    job = Job(12, 2, layout.stage, itemsize=2 if layout.dtype == "bf16" else 4, bucket=BUCKET)
    lines = {line.name: line.bytes for line in states(facts, topology, job) if line.phase == "always"}
    largest = max(weight.local(topology) for weight in facts.weights) * job.itemsize
    layout = replace(layout, extra=(("zero_optimization", {"reduce_bucket_size": BUCKET}),))
    least = int(lines["gradients"]) + (BUCKET * job.itemsize if layout.stage == 3 else 0)
    # ZeRO 1 and 2 keep a parameter's whole gradient where its partition has a part of it, and let go of the last
    # reduced one in the next forward. The batch and the loss are less than 2 KB.
    most = least + (2 * largest if layout.stage in (1, 2) else 0) + 2048
    for held in launcher.run(2, held_bytes, layout=layout, most=most):
        assert held["parameters"] == lines["parameters"]
        assert held["optimizer"] == lines["optimizer"]
        assert least <= held["rest"] <= most
        assert sum(held.values()) == pytest.approx(sum(lines.values()), rel=0.1)
