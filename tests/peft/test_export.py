"""What a live engine with adapters writes, and what merging does to it, against the same model unsharded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import ds_etp
from ds_etp.errors import CheckpointError, ConfigError
from tests.launcher import Launcher
from tests.models import make_batch, make_model
from tests.oracle import train_unsharded
from tests.peft.models import BOTH, LoraRecipe
from tests.sharded import Layout, full_tensors, make_engine, run_steps
from tests.tolerances import TENSOR

LAYOUTS = [
    Layout(2, etp=2, stage=1),
    Layout(4, 2, 2, 2, stage=0),
    Layout(4, 2, 4, stage=2),
    Layout(4, 1, 2, 2, stage=3),
]
NAMES = [f"tp{layout.tp}-etp{layout.etp}-ep{layout.ep}-zero{layout.stage}" for layout in LAYOUTS]
RECIPE = replace(BOTH, steps=2)


def logits(model: Any) -> Tensor:
    """The answer to one batch, the same on every rank."""
    with torch.no_grad():
        result: Tensor = model(input_ids=make_batch(99, 0)["input_ids"]).logits.float()
    return result


def trained(recipe: LoraRecipe) -> Any:
    """The recipe's model after its steps, unsharded."""
    model = recipe.model().eval()
    model.load_state_dict(train_unsharded(recipe).weights, strict=False)
    return model


def assert_close(got: Tensor, wanted: Tensor, what: str = "logits") -> None:
    """To the rounding of sums in another order."""
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= TENSOR, f"{what}: off by {error:.1e}"


# In the workers


def train_and_save(recipe: LoraRecipe, layout: Layout, folder: str) -> dict[str, Tensor]:
    """Trains, and writes the adapters by every way there is."""
    engine = make_engine(recipe, layout)
    run = run_steps(engine, recipe, layout)
    ds_etp.save_pretrained(engine, f"{folder}/ours")
    engine.save_16bit_model(f"{folder}/engine")
    state = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(f"{folder}/state", state_dict=state)
    try:
        engine.module.save_pretrained(f"{folder}/own-{dist.get_rank()}")
        assert layout.tp == 1 and layout.stage < 3
    except CheckpointError as error:
        assert "ds_etp.save_pretrained(engine, folder)" in str(error)
        assert layout.tp > 1 or layout.stage == 3
    engine.destroy()
    return run.weights


def merge_and_back(recipe: LoraRecipe, layout: Layout, folder: str) -> dict[str, Any]:
    """Merges and unmerges on a live engine, and goes on without adapters at the end."""
    engine = make_engine(recipe, layout)
    model = engine.module.eval()
    seen: dict[str, Any] = {"adapted": logits(engine)}
    with model.disable_adapter():
        seen["disabled"] = logits(engine)
    if layout.stage == 3:
        for change in (model.base_model.merge_adapter, model.base_model.unmerge_adapter):
            with pytest.raises(ConfigError, match=r"zero_optimization\.stage=3 keeps weights in parts"):
                change()
        engine.destroy()
        return seen
    before = full_tensors(engine, lambda parameter: parameter.data)
    model.merge_adapter()
    seen["merged"] = logits(engine)
    seen["weights"] = full_tensors(engine, lambda parameter: parameter.data)
    model.unmerge_adapter()
    after = full_tensors(engine, lambda parameter: parameter.data)
    seen["round trip"] = max((after[name] - before[name]).abs().max().item() for name in before)
    model.merge_adapter(safe_merge=True)
    unloaded = model.merge_and_unload()
    seen["unloaded"] = logits(unloaded)
    with pytest.raises(CheckpointError, match="shards"):
        unloaded.save_pretrained(folder)
    ds_etp.save_pretrained(engine, folder)
    engine.destroy()
    return seen


# The tests


@pytest.mark.sample("tp2-etp2-ep2-zero0", "tp1-etp2-ep2-zero3")
@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_adapters_out_and_in_again(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    """Saved from an engine, loaded onto the unsharded base by PEFT, trained weights and all."""
    recipe = replace(RECIPE, dp=layout.dp)
    weights = launcher.run(layout.world, train_and_save, recipe=recipe, layout=layout, folder=str(tmp_path))[0]
    wanted = trained(recipe)
    own = [f"own-{rank}" for rank in range(layout.world)] if layout.tp == 1 and layout.stage < 3 else []
    for kind in ("ours", "engine", "state", *own):
        model = PeftModel.from_pretrained(make_model(recipe.family, recipe.seed), tmp_path / kind).eval()
        for name, tensor in model.state_dict().items():
            if "lora_" in name:
                assert torch.equal(tensor, weights[name]), f"{kind}: {name}"
        assert_close(logits(model), logits(wanted), kind)
        assert sorted(path.name for path in (tmp_path / kind).glob("*.safetensors")) == ["adapter_model.safetensors"]


@pytest.mark.sample("tp2-etp4-ep1-zero2", "tp1-etp2-ep2-zero3")
@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_merge(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    """Merged weights are the merged weights of the unsharded model, cut."""
    # At ZeRO-3, only experts: attention's adapters are PEFT's own to merge, and fail in PEFT.
    recipe = replace(RECIPE, dp=layout.dp, modules=RECIPE.modules if layout.stage < 3 else ())
    wanted = recipe.model().eval()
    adapted = logits(wanted)
    with wanted.disable_adapter():
        disabled = logits(wanted)
    wanted.merge_adapter()
    assert (disabled - adapted).abs().max() > 1e-3  # adapters that do nothing would prove nothing
    for seen in launcher.run(layout.world, merge_and_back, recipe=recipe, layout=layout, folder=str(tmp_path)):
        assert_close(seen["adapted"], adapted)
        assert_close(seen["disabled"], disabled)
        if layout.stage == 3:
            continue
        assert_close(seen["merged"], adapted)
        assert_close(seen["unloaded"], adapted)
        assert seen["round trip"] < 1e-7  # one rounding of weights of size 1
        for name, tensor in wanted.named_parameters():
            assert_close(seen["weights"][name], tensor.detach(), name)
    if layout.stage < 3:
        assert_close(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), adapted, "the merged model's folder"
        )
