"""`ds-etp export`: a model out of a checkpoint, in one process, with no engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ds_etp.cli import main as cli
from tests.export.test_live import LIMIT, assert_same_bits, assert_same_logits, load, trained
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine, run_steps


def checkpoint(recipe: Recipe, layout: Layout, folder: str) -> dict[str, torch.Tensor]:
    """Trains, saves a checkpoint and returns the full weights."""
    engine = make_engine(recipe, layout)
    run = run_steps(engine, recipe, layout)
    engine.save_checkpoint(folder)
    engine.destroy()
    return run.weights


@pytest.mark.parametrize(
    "layout",
    [Layout(world=2, etp=2, stage=3), Layout(world=4, tp=2, etp=2, ep=2, stage=1)],
    ids=["zero3", "tp2-ep2"],
)
def test_export(launcher: Launcher, tmp_path: Path, layout: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe(dp=layout.dp, steps=2)
    folder = tmp_path / "checkpoint"
    weights = launcher.run(layout.world, checkpoint, timeout=LIMIT, recipe=recipe, layout=layout, folder=str(folder))[0]
    (folder / "tokenizer.json").write_text("{}")
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    loaded = load(tmp_path / "out")
    assert_same_bits(loaded, weights)
    assert_same_logits(loaded, trained(recipe))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    # Its tag, another type, several files.
    (tag,) = folder.glob("global_step*")
    command = ["export", str(tag), str(tmp_path / "bf16"), "--dtype", "bf16", "--max-shard-size", "20KB"]
    assert cli.main(command) == 0
    assert_same_bits(
        load(tmp_path / "bf16", dtype="auto"), {name: weight.bfloat16() for name, weight in weights.items()}
    )


def test_damaged_checkpoints(launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint"
    recipe, layout = Recipe(steps=1, dp=2), Layout(world=2, etp=2)
    launcher.run(2, checkpoint, timeout=LIMIT, recipe=recipe, layout=layout, folder=str(folder))
    out = str(tmp_path / "out")
    assert cli.main(["export", str(folder), out, "--dtype", "int8"]) == 2
    assert "int8" in capsys.readouterr().err
    (shard, *_) = sorted(folder.rglob("rank*.safetensors"))
    shard.unlink()
    assert cli.main(["export", str(folder), out]) == 2
    assert str(shard) in capsys.readouterr().err
    shutil.rmtree(folder)
    assert cli.main(["export", str(folder), out]) == 2
    assert str(folder) in capsys.readouterr().err
