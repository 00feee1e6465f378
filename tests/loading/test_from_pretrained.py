"""ZeRO-3 `from_pretrained`: weights are partitioned while they load, then split."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_etp
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config, full_tensors, weight


def load(folder: str, layout: Layout) -> dict[str, torch.Tensor]:
    """The full weights of an engine whose model was loaded partitioned."""
    ds_etp.register()
    config = ds_config(Recipe(dp=layout.dp), layout)
    alive = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    del alive
    weights = full_tensors(engine, weight)
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    "layout", [Layout(world=4, etp=2, ep=2, stage=3), Layout(world=4, tp=2, etp=4, stage=3)], ids=str
)
def test_weights_are_those_of_the_folder(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    """To the bit. Mixtral's folder has one tensor for each expert, which are fused on the way."""
    model = Recipe().model()
    model.save_pretrained(tmp_path)
    weights = launcher.run(4, load, folder=str(tmp_path), layout=layout)[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name
