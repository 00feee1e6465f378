"""The model's own `save_pretrained` would write shards: it says so, unless it is given the whole tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import ds_etp
from ds_etp.checkpoint.export_api import consolidated_state_dict
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine


def save(folder: str) -> str:
    """The error without tensors; with them the model is written."""
    engine = make_engine(Recipe(), Layout(world=2, etp=2))
    with pytest.raises(ds_etp.CheckpointError) as error:
        engine.module.save_pretrained(folder)
    state = consolidated_state_dict(engine)
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state)
    engine.destroy()
    return str(error.value)


def test_refused_without_the_whole_tensors(launcher: Launcher, tmp_path: Path) -> None:
    """The message names the call that works."""
    for message in launcher.run(2, save, folder=str(tmp_path)):
        assert "ds_etp.save_pretrained(engine" in message
    assert list(tmp_path.glob("*.safetensors"))
