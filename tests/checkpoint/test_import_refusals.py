"""What `ds-etp import` refuses, and what it says; importing in place; exporting what was imported."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_etp.checkpoint.format import StoredCheckpoint
from ds_etp.cli.main import main
from tests.checkpoint.runs import RECIPE, go, tensors_of
from tests.launcher import Launcher
from tests.sharded import Layout, make_engine

PLAIN = Layout(2, stage=1, with_block=False)
TAG = "global_step1"
MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def save_plain(folder: str, stages: tuple[int, ...]) -> None:
    """One step of plain DeepSpeed at each ZeRO stage."""
    for stage in stages:
        layout = Layout(2, stage=stage, with_block=False)
        engine = make_engine(RECIPE, layout)
        go(engine, RECIPE, layout, 0, 1)
        engine.save_checkpoint(f"{folder}/{stage}")
        engine.destroy()


@pytest.fixture(scope="module")
def saved(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of plain DeepSpeed, one folder a stage."""
    folder = tmp_path_factory.mktemp("plain")
    launcher.run(2, save_plain, folder=str(folder), stages=(0, 1))
    return folder


def edited(name: str, edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        edit(content)
        torch.save(content, folder / name)

    return change


def added(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(b"")


def shorter(content: dict[str, Any]) -> None:
    partitions = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    partitions[0] = partitions[0][:100]


DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a rank's file": (lambda folder: (folder / OPTIMIZER).unlink(), ["ranks [0]", "split over ['2'] ranks"]),
    "the model's file": (lambda folder: (folder / MODEL).unlink(), [MODEL, "is missing"]),
    "half a file": (lambda folder: os.truncate(folder / OPTIMIZER, 5000), [OPTIMIZER, "is damaged or"]),
    "a short partition": (edited(OPTIMIZER, shorter), ["parameter group 0 has", "shapes give"]),
    "tensor parallelism": (added("mp_rank_01_model_states.pt"), ["tensor or pipeline parallelism", "mp_rank_01"]),
    "AutoTP": (edited(MODEL, lambda content: content.update(mp_world_size=2)), ["with tensor parallelism"]),
    "pipeline": (added("layer_00-model_00-model_states.pt"), ["pipeline layers", "plain data parallelism"]),
    "experts": (added("layer_0_expert_1_mp_rank_00_model_states.pt"), ["expert parallelism"]),
    "objects": (
        edited(MODEL, lambda content: content.update(args=argparse.Namespace(lr=1))),
        [MODEL, "argparse.Namespace", "--trust-pickle"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """The reason is said, and no checkpoint is made."""
    change, words = DAMAGES[damage]
    shutil.copytree(saved / "1", tmp_path / "plain")
    change(tmp_path / "plain" / TAG)
    assert main(["import", str(tmp_path / "plain"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert not list((tmp_path / "out").rglob("*.*"))


def test_zero_0_is_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(saved / "0"), str(tmp_path)]) == 2
    assert "ds_etp.save_checkpoint" in capsys.readouterr().err


def test_trusted_objects_are_left_out(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "1", tmp_path / "plain")
    edited(MODEL, lambda content: content.update(args=argparse.Namespace(lr=1), epoch=2))(tmp_path / "plain" / TAG)
    assert main(["import", str(tmp_path / "plain"), str(tmp_path / "out"), "--trust-pickle"]) == 0
    state = torch.load(tmp_path / "out" / TAG / "state.pt", weights_only=True)
    assert state["client_state"] == {"epoch": 2}


def test_in_place_and_again(saved: Path, tmp_path: Path) -> None:
    """By the directory of tags and by the tag's folder: DeepSpeed's files stay, and the second import replaces ours."""
    folder = tmp_path / "plain"
    shutil.copytree(saved / "1", folder)
    theirs = {path.name for path in (folder / TAG).iterdir()}
    found = []
    for source, directory in ((folder, folder), (folder / TAG, folder), (folder / TAG, folder / TAG)):
        assert main(["import", str(source), str(directory)]) == 0
        found.append(tensors_of(folder / TAG))
        names = {path.name for path in (folder / TAG).iterdir()}
        assert theirs < names and len(names - theirs) == 3
        with StoredCheckpoint.open(folder / TAG) as stored:
            for name in stored.index.files:
                stored.check_file(name)
    assert all(torch.equal(found[0][key], found[2][key]) for key in found[0])
    assert json.loads((folder / TAG / "index.json").read_text())["layout"]["world"] == 2
    assert (folder / "latest").read_text() == TAG


def test_exports_with_a_config(saved: Path, tmp_path: Path) -> None:
    """DeepSpeed's files don't tell the model's config."""
    assert main(["import", str(saved / "1"), str(tmp_path / "out")]) == 0
    RECIPE.model().config.save_pretrained(tmp_path / "config")
    command = ["export", str(tmp_path / "out"), str(tmp_path / "model"), "--config", str(tmp_path / "config")]
    assert main([*command, "--dtype", "fp32"]) == 0
    tensors = tensors_of(tmp_path / "out" / TAG)
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters():
        assert torch.equal(parameter, tensors[f"fp32/{name}"]), name
