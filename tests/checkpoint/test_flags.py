"""Flags, tags, client state, schedulers, frozen parameters, and what is written how often."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_etp.checkpoint import writer
from ds_etp.checkpoint.format import StoredCheckpoint
from ds_etp.errors import CheckpointError
from tests.checkpoint.runs import OTHER_SEED, RECIPE, engine_for, go
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, full_tensors

SCHEDULER = (
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 50}}),
)
LAYOUT = Layout(2, 2, 2, 1, 1, extra=SCHEDULER)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The weights that compute, whole."""
    return full_tensors(engine, lambda parameter: parameter.data.clone())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def flags(folder: str) -> None:
    """One saved run, loaded by each flag into an engine of its own state."""
    engine = engine_for(RECIPE, LAYOUT)
    for name in ("save_checkpoint", "load_checkpoint"):
        assert inspect.signature(getattr(engine, name)).parameters.keys() == (
            inspect.signature(getattr(DeepSpeedEngine, name)).parameters.keys() - {"self"}
        )
    go(engine, RECIPE, LAYOUT, 0, 2)
    saved, rate, moment = weights(engine), engine.get_lr()[0], first_moment(engine)
    client = {"epoch": 3, "seen": torch.arange(4), "name": "x"}
    assert engine.save_checkpoint(folder, client_state=client) is True
    assert (Path(folder) / "latest").read_text() == "global_step2"
    go(engine, RECIPE, LAYOUT, 2, 1)
    assert engine.save_checkpoint(folder, tag="other", save_latest=False)
    assert (Path(folder) / "latest").read_text() == "global_step2"
    engine.destroy()

    engine = engine_for(replace(RECIPE, seed=OTHER_SEED), LAYOUT)
    go(engine, RECIPE, LAYOUT, 7, 1)
    own_moment, own_rate = first_moment(engine), engine.get_lr()[0]
    path, state = engine.load_checkpoint(folder, load_module_only=True)
    assert path is not None and Path(path).parent == Path(folder) / "global_step2"
    assert state["epoch"] == 3 and state["name"] == "x" and torch.equal(state["seen"], client["seen"])
    assert same(weights(engine), saved) and engine.global_steps == 1
    assert first_moment(engine) == own_moment and engine.get_lr()[0] == own_rate
    engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert engine.global_steps == 2 and first_moment(engine) == own_moment and engine.get_lr()[0] == own_rate
    assert engine.lr_scheduler.last_batch_iteration == 0
    engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert first_moment(engine) == moment and engine.lr_scheduler.last_batch_iteration == 0
    engine.load_checkpoint(folder)
    assert engine.get_lr()[0] == rate and engine.lr_scheduler.last_batch_iteration == 1
    assert engine.global_samples == 2 * engine.train_batch_size()
    engine.load_checkpoint(folder, tag="other")
    assert engine.global_steps == 3
    engine.destroy()


def first_moment(engine: Any) -> float:
    """A number that tells this rank's moments from others."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return sum(float(state["exp_avg"].double().sum()) for state in base.state.values())


def test_flags(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(2, flags, folder=str(tmp_path), timeout=240)


def frozen_engine(recipe: Recipe, layout: Layout) -> Any:
    """An engine whose routers, norms, first layer's experts and embedding are frozen."""
    model = recipe.model().train()
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("gate.", "norm", "embed", "layers.0.mlp.experts")):
            parameter.requires_grad_(False)
    import deepspeed

    import ds_etp
    from tests.sharded import ds_config

    ds_etp.register()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, config=ds_config(recipe, layout), model_parameters=trained)[0]


def frozen(folder: str, layout: Layout, other: Layout) -> None:
    """Frozen parameters are saved, or left out; either way the rest comes back on another layout."""
    engine = frozen_engine(RECIPE, layout)
    go(engine, RECIPE, layout, 0, 2)
    engine.save_checkpoint(folder, tag="all")
    engine.save_checkpoint(folder, tag="trained", exclude_frozen_parameters=True)
    losses = go(engine, RECIPE, layout, 2, 2).losses
    engine.destroy()
    engine = frozen_engine(replace(RECIPE, seed=OTHER_SEED), other)
    try:
        engine.load_checkpoint(folder, tag="trained")
        raise AssertionError("frozen parameters are missing, and nobody said so")
    except CheckpointError as error:
        assert "exclude_frozen_parameters" in str(error)
    engine.load_checkpoint(folder, tag="all")
    check(go(engine, RECIPE, other, 2, 2).losses, losses)
    engine.destroy()
    engine = frozen_engine(RECIPE, other)
    engine.load_checkpoint(folder, tag="trained", load_module_strict=False)
    check(go(engine, RECIPE, other, 2, 2).losses, losses)
    engine.destroy()


def check(got: list[float], wanted: list[float]) -> None:
    assert all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(got, wanted, strict=True)), (got, wanted)


def test_frozen(launcher: Launcher, tmp_path: Path) -> None:
    """Both ways between ZeRO-1 and ZeRO-3; dp is the same, so that the batches are."""
    one, three = Layout(4, 2, 2, 1, 1), Layout(4, 2, 1, 4, 3)
    launcher.run(4, frozen, folder=str(tmp_path / "a"), layout=one, other=three, timeout=240)
    launcher.run(4, frozen, folder=str(tmp_path / "b"), layout=three, other=one, timeout=240)
    with StoredCheckpoint.open(tmp_path / "a" / "trained") as stored:
        assert "fp32/model.layers.0.mlp.experts.down_proj" not in stored.index.tensors
        assert "fp32/model.layers.1.mlp.experts.down_proj" in stored.index.tensors
        assert "model.layers.0.mlp.experts.down_proj" in stored.index.extra["excluded"]


def measured_save(folder: str, layout: Layout) -> tuple[int, int, int]:
    """Saves; the bytes this rank wrote, its largest single write, and the largest shard it holds."""
    engine = engine_for(RECIPE, layout)
    go(engine, RECIPE, layout, 0, 1)
    sizes: list[int] = []
    original = writer.TensorFile.add

    def add(self: Any, key: str, tensor: torch.Tensor) -> None:
        sizes.append(tensor.numel() * tensor.element_size())
        original(self, key, tensor)

    writer.TensorFile.add = add  # type: ignore[method-assign]
    try:
        engine.save_checkpoint(folder)
    finally:
        writer.TensorFile.add = original  # type: ignore[method-assign]
    # ds_numel: ZeRO-3 shows an empty tensor.
    largest = max(getattr(p, "ds_numel", p.numel()) * 4 for p in engine.module.parameters())
    engine.destroy()
    return sum(sizes), max(sizes, default=0), largest


def test_every_box_once(launcher: Launcher, tmp_path: Path) -> None:
    """Three tensors (weight, two moments) of every parameter, spread over the ranks, no replica twice."""
    layout = Layout(4, 2, 2, 1, 3)
    measures = launcher.run(4, measured_save, folder=str(tmp_path), layout=layout)
    parameters = sum(parameter.numel() for parameter in RECIPE.model().parameters())
    assert sum(written for written, _, _ in measures) == 3 * 4 * parameters
    for written, single, largest in measures:
        assert single <= largest
        assert written <= 0.5 * 3 * 4 * parameters, "one rank writes more than its part"
    content = json.loads((tmp_path / "global_step1" / "index.json").read_text())
    chunks = content["tensors"]["exp_avg/model.layers.0.mlp.experts.gate_up_proj"]["boxes"]
    assert len(chunks) == 4, "gate and up, by two etp ranks"
