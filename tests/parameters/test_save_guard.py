"""No door writes a shard under a whole's name: each says which call works; whole tensors go through."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch.distributed as dist

from ds_etp.checkpoint.export_api import consolidated_state_dict
from ds_etp.errors import CheckpointError
from tests.launcher import Launcher
from tests.models import make_model
from tests.oracle import Recipe
from tests.parameters.runs import named
from tests.peft.models import BOTH
from tests.sharded import Layout, make_engine

REFUSED = r"ds_etp\.save_pretrained\(engine, folder\)"


def save(layout: Layout, folder: str) -> None:
    """Every door of a transformers model."""
    engine, unsharded = make_engine(Recipe(dp=layout.dp), layout), make_model("mixtral")
    model, shards, rank = engine.module, engine.module.state_dict(), dist.get_rank()
    with pytest.raises(CheckpointError, match=REFUSED):
        model.save_pretrained(f"{folder}/none")
    with pytest.raises(CheckpointError, match=REFUSED):
        model.save_pretrained(f"{folder}/shards", state_dict=shards)
    with pytest.raises(CheckpointError, match=REFUSED):
        model.save_pretrained(f"{folder}/shards", True, shards)
    with pytest.raises(CheckpointError, match=REFUSED):
        safetensors.torch.save_model(model, f"{folder}/model.safetensors")
    whole = consolidated_state_dict(engine)
    if rank == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=whole)
        model.save_pretrained(f"{folder}/positional", True, whole)
    safetensors.torch.save_model(unsharded, f"{folder}/unsharded-{rank}.safetensors")
    unsharded.save_pretrained(f"{folder}/unsharded-{rank}", state_dict=unsharded.state_dict())
    engine.destroy()


def save_adapters(layout: Layout, folder: str) -> None:
    """Every door of a PeftModel, whose split base weights aren't written."""
    engine = make_engine(BOTH, layout)
    model, rank = engine.module, dist.get_rank()
    whole = consolidated_state_dict(engine)
    if layout.tp > 1 or layout.stage == 3:
        with pytest.raises(CheckpointError, match=REFUSED):
            model.save_pretrained(f"{folder}/shards", state_dict=model.state_dict())
    else:
        model.save_pretrained(f"{folder}/own-{rank}", state_dict=model.state_dict())
    with pytest.raises(CheckpointError, match=REFUSED):
        safetensors.torch.save_model(model, f"{folder}/model.safetensors")
    if rank == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=whole)
    engine.destroy()


LAYOUTS = [Layout(2, etp=2), Layout(2, ep=2, stage=3), Layout(2, tp=2, etp=2, stage=0)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_models(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    launcher.run(2, save, layout=layout, folder=str(tmp_path))
    assert {path.parent.name for path in tmp_path.rglob("*.safetensors") if "unsharded" not in str(path)} == {
        "whole",
        "positional",
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_adapters(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    launcher.run(2, save_adapters, layout=layout, folder=str(tmp_path))
    assert not (tmp_path / "shards").exists() and not list(tmp_path.glob("*.safetensors"))
    assert (tmp_path / "whole" / "adapter_model.safetensors").exists()
