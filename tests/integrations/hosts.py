"""Trainings started as Axolotl, ms-swift and a Trainer with a callback start them. Runs in worker processes."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer

import ds_etp
from ds_etp.engine import is_registered
from tests.models import make_model
from tests.peft.models import ONLY_ATTENTION
from tests.sharded import Layout, full_tensors, weight
from tests.trainer.runs import Job, Outcome, Sequences, arguments, deepspeed_config, forget_host_state, outcome

JOB = Job(train=16, held_out=2)
_BASE = "axolotl.integrations.base"


def axolotl_plugin() -> Any:
    """The plugin's class. Without Axolotl, its base class is an empty one: the rest of it is left as it is."""
    if "axolotl" not in sys.modules and importlib.util.find_spec("axolotl") is None:
        base = types.ModuleType(_BASE)
        base.BasePlugin = type("BasePlugin", (), {"stands_in": True})  # type: ignore[attr-defined]
        package, inner = types.ModuleType("axolotl"), types.ModuleType("axolotl.integrations")
        sys.modules |= {"axolotl": package, "axolotl.integrations": inner, _BASE: base}
    from ds_etp.integrations.axolotl import ExpertTensorParallelPlugin

    return ExpertTensorParallelPlugin


def trainer_of(layout: Layout, folder: Path, callbacks: list[Any], model: Any = None) -> Trainer:
    """A Trainer over the layout's ranks, not started."""
    return Trainer(
        model=model or make_model(JOB.family, router_aux_loss_coef=JOB.aux),
        args=arguments(JOB, folder, layout.dp, deepspeed_config(layout)),
        train_dataset=Sequences(JOB.train),
        eval_dataset=Sequences(JOB.held_out, first=500),
        callbacks=callbacks,
    )


def finished(trainer: Trainer) -> Outcome:
    """What it did, with its weights."""
    result = outcome(trainer)
    result.weights = full_tensors(trainer.deepspeed, weight)
    return result


def as_axolotl(layout: Layout, folder: Path, *, adapters: bool = False) -> Outcome:
    """The plugin's hooks in Axolotl's order, and Axolotl's final save: on rank 0, or at ZeRO-3 on all."""
    cfg = {"deepspeed": deepspeed_config(layout), "output_dir": str(folder / "out"), "use_scattermoe": False}
    plugin = axolotl_plugin()()
    try:
        plugin.register(cfg)
        plugin.pre_model_load(cfg)
        model = make_model(JOB.family, router_aux_loss_coef=JOB.aux)
        if adapters:
            model = ONLY_ATTENTION.adapt(model)
        trainer = trainer_of(layout, folder / "out", [], model)
        for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
            trainer.add_callback(callback)
        trainer.train()
        if layout.stage == 3:
            trainer.save_model(cfg["output_dir"])
        elif dist.get_rank() == 0:
            trainer.model.save_pretrained(cfg["output_dir"])
        result = finished(trainer)
        trainer.deepspeed.destroy()
        return result
    finally:
        forget_host_state()


def as_ms_swift(layout: Layout, folder: Path) -> Outcome:
    """The file, run as ms-swift runs `--external_plugins`."""
    assert not is_registered()
    file = Path(ds_etp.__path__[0]) / "integrations" / "ms_swift.py"
    spec = importlib.util.spec_from_file_location("_swift_external_0", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return trained(layout, folder, [])


def with_callback(layout: Layout, folder: Path) -> Outcome:
    """The callback, made with the Trainer."""
    from ds_etp.integrations.trainer import ExpertTensorParallelCallback

    assert not is_registered()
    return trained(layout, folder, [ExpertTensorParallelCallback()])


def with_callback_undone(layout: Layout, folder: Path) -> str:
    """What the callback says when something unregisters ds_etp before the engine is made."""
    from ds_etp.integrations.trainer import ExpertTensorParallelCallback

    callback = ExpertTensorParallelCallback()
    ds_etp.unregister()
    try:
        trained(layout, folder, [callback])
    except ds_etp.ConfigError as error:
        return str(error)
    return ""


def trained(layout: Layout, folder: Path, callbacks: list[Any]) -> Outcome:
    """Trains to the end."""
    try:
        trainer = trainer_of(layout, folder, callbacks)
        trainer.train()
        result = finished(trainer)
        trainer.deepspeed.destroy()
        return result
    finally:
        forget_host_state()
