"""A model that an engine has sharded can't be sharded again: its shards would be taken for the whole."""

from __future__ import annotations

import deepspeed
import pytest

import ds_etp
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config


def initialize_twice(layout: Layout) -> str:
    """The error of the second initialize."""
    recipe = Recipe(dp=layout.dp)
    ds_etp.register()
    model = recipe.model()
    config = ds_config(recipe, layout)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    with pytest.raises(ds_etp.ConfigError) as error:
        deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    engine.destroy()
    return str(error.value)


def test_refused(launcher: Launcher) -> None:
    """With the layer and the reason."""
    for message in launcher.run(2, initialize_twice, layout=Layout(world=2, etp=2)):
        assert "model.layers.0.mlp.experts" in message and "a shard already" in message
