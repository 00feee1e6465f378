"""A pipeline's checkpoints: resumed to the bit, cut into other stages, into no stages, and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import ds_etp
from ds_etp.checkpoint.export_api import export_checkpoint
from tests.launcher import Launcher
from tests.oracle import Recipe, Run, train_unsharded
from tests.pipeline.runs import Pipeline, make_engine, run_steps
from tests.sharded import Layout
from tests.sharded import make_engine as make_whole
from tests.sharded import run_steps as run_whole
from tests.tolerances import TENSOR, assert_equal_runs

SAVED = 2
RECIPE = Recipe(
    optimizer="adamw",
    dp=2,
    steps=2 * SAVED,
    accumulate=2,
    changes=(("output_router_logits", False), ("tie_word_embeddings", True)),
)
# An engine that loads begins with other weights than the one that saved.
OTHER = replace(RECIPE, seed=99)
FIRST = Pipeline(Layout(world=4, etp=2, stage=1))
# Another stage for each layer, experts dealt out, and no ZeRO.
SECOND = Pipeline(Layout(world=4, ep=2, stage=0), cuts=(3,))
THIRD = Pipeline(Layout(world=8, tp=2, etp=4, stage=1))
WHOLE = Layout(world=2, etp=2, stage=3)


def save_and_resume(folder: str) -> tuple[Run, Run, Run] | None:
    """Saves after the first steps and goes on; resumes in the same layout, and in another."""
    engine = make_engine(RECIPE, FIRST)
    run_steps(engine, replace(RECIPE, steps=SAVED))
    assert engine.save_checkpoint(folder, client_state={"seen": 3}) is True
    runs = [run_steps(engine, RECIPE, first=SAVED)]
    engine.destroy()
    for pipeline in (FIRST, SECOND):
        engine = make_engine(OTHER, pipeline)
        path, state = engine.load_checkpoint(folder)
        assert path is not None and state == {"seen": 3} and engine.global_steps == SAVED
        if pipeline is SECOND:
            engine.save_16bit_model(f"{folder}-16bit")
        else:
            ds_etp.save_pretrained(engine, f"{folder}-masters", dtype="fp32")
        runs.append(run_steps(engine, RECIPE, first=SAVED))
        engine.destroy()
    return tuple(runs) if dist.get_rank() == 0 else None  # type: ignore[return-value]


def load_whole(folder: str, again: str) -> Run | None:
    """Goes on without stages at ZeRO-3, from a pipeline's checkpoint; saves before it does."""
    engine = make_whole(OTHER, WHOLE)
    assert engine.load_checkpoint(folder)[0] is not None
    engine.save_checkpoint(again)
    run = run_whole(engine, RECIPE, WHOLE, first=SAVED)
    engine.destroy()
    return run if dist.get_rank() == 0 else None


def load_staged(folder: str) -> Run | None:
    """Goes on with stages split by tp too, from a checkpoint that was written without."""
    engine = make_engine(OTHER, THIRD)
    assert engine.load_checkpoint(folder)[0] is not None
    run = run_steps(engine, RECIPE, first=SAVED)
    engine.destroy()
    return run if dist.get_rank() == 0 else None


def test_save_load_export(launcher: Launcher, tmp_path: Path) -> None:
    folder, again = str(tmp_path / "staged"), str(tmp_path / "whole")
    gone_on, resumed, moved = launcher.run(4, save_and_resume, folder=folder)[0]
    assert resumed.losses == gone_on.losses and resumed.norms == gone_on.norms
    for name, tensor in gone_on.weights.items():
        assert torch.equal(resumed.weights[name], tensor), name
    oracle = train_unsharded(RECIPE)
    rest = Run(oracle.losses[SAVED:], oracle.norms[SAVED:], oracle.grads, oracle.weights)
    assert_equal_runs(moved, rest)
    assert_equal_runs(launcher.run(2, load_whole, folder=folder, again=again)[0], rest)
    assert_equal_runs(launcher.run(8, load_staged, folder=again)[0], rest)
    export_checkpoint(Path(folder), tmp_path / "hub")
    saved = train_unsharded(replace(RECIPE, steps=SAVED)).weights
    for exported in (tmp_path / "hub", f"{folder}-16bit", f"{folder}-masters"):
        model = AutoModelForCausalLM.from_pretrained(exported)
        assert model.config.tie_word_embeddings
        for name, parameter in model.named_parameters():
            assert (parameter - saved[name]).abs().max() <= TENSOR * saved[name].abs().max(), name
