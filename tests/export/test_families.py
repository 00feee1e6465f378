"""Hub formats: experts apart (Mixtral, Qwen3-MoE), experts fused (GraniteMoE), embeddings tied, odd requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

import ds_etp
from ds_etp.errors import CheckpointError
from tests.export.test_live import LIMIT, assert_same_bits, load
from tests.launcher import Launcher
from tests.models import CONFIGS
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine, run_steps

CONFIGS.setdefault(
    "granitemoe",
    ("GraniteMoeConfig", {"intermediate_size": 16, "num_local_experts": 4, "router_aux_loss_coef": 0.05}),
)
LAYOUT = Layout(world=4, tp=2, etp=2, ep=2)


def keys(folder: Path) -> set[str]:
    """Names in a folder's weight files."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def save(recipe: Recipe, layout: Layout, folder: str) -> dict[str, Any] | None:
    """Writes a fresh model; rank 0 returns its consolidated state dict, as accelerate and PEFT users get it."""
    engine = make_engine(recipe, layout)
    ds_etp.save_pretrained(engine, folder)
    state = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    assert (state is None) == (dist.get_rank() != 0)
    return state


@pytest.mark.sample(
    "1-mixtral-model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "3-granitemoe-model.layers.1.block_sparse_moe.output_linear.weight",
    "1-gpt_oss-model.layers.1.mlp.experts.down_proj_bias",
    "3-aria_text-model.layers.1.mlp.experts.fc2.weight",
    "1-nemotron_h-backbone.layers.1.mixer.experts.3.down_proj.weight",
    "3-llama4_text-model.layers.1.feed_forward.experts.down_proj",
    "3-longcat_flash-model.layers.0.mlp.experts.3.down_proj.weight",
)
@pytest.mark.parametrize(
    ("family", "hub_name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.7.down_proj.weight"),
        ("granitemoe", "model.layers.1.block_sparse_moe.output_linear.weight"),
        # One for each other kind of layout.
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("aria_text", "model.layers.1.mlp.experts.fc2.weight"),
        ("nemotron_h", "backbone.layers.1.mixer.experts.3.down_proj.weight"),
        ("llama4_text", "model.layers.1.feed_forward.experts.down_proj"),
        ("longcat_flash", "model.layers.0.mlp.experts.3.down_proj.weight"),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_hub_formats(launcher: Launcher, tmp_path: Path, family: str, hub_name: str, stage: int) -> None:
    recipe = Recipe(family=family)
    tp = 1 if family == "longcat_flash" else LAYOUT.tp  # AutoTP refuses its attention
    layout = Layout(LAYOUT.world, tp, LAYOUT.etp, LAYOUT.ep, stage=stage)
    state = launcher.run(4, save, timeout=LIMIT, recipe=recipe, layout=layout, folder=str(tmp_path))[0]
    assert hub_name in keys(tmp_path)
    model = recipe.model()
    assert_same_bits(load(tmp_path), model.state_dict())
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    # What transformers itself writes from that state has the same files.
    model.save_pretrained(tmp_path / "hf")
    assert keys(tmp_path / "hf") == keys(tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_tied_embeddings(launcher: Launcher, tmp_path: Path, tp: int) -> None:
    recipe = Recipe(changes=(("tie_word_embeddings", True),))
    layout = Layout(world=2, tp=tp, etp=2, stage=1)
    state = launcher.run(2, save, timeout=LIMIT, recipe=recipe, layout=layout, folder=str(tmp_path))[0]
    assert "lm_head.weight" not in keys(tmp_path)
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_bits(loaded, recipe.model().state_dict())
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]


def save_in_bf16(recipe: Recipe, layout: Layout, folder: str) -> dict[str, torch.Tensor]:
    """A model that computes in bf16, trained, written in bf16 and as its fp32 master weights."""
    engine = make_engine(recipe, layout)
    run = run_steps(engine, recipe, layout)
    ds_etp.save_pretrained(engine, f"{folder}/computed")
    ds_etp.save_pretrained(engine, f"{folder}/master", dtype="fp32")
    engine.destroy()
    return run.weights


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_master_weights(launcher: Launcher, tmp_path: Path, stage: int) -> None:
    layout = Layout(LAYOUT.world, LAYOUT.tp, LAYOUT.etp, LAYOUT.ep, stage=stage, dtype="bf16")
    recipe = Recipe(dp=2, steps=2, optimizer="adamw")
    weights = launcher.run(4, save_in_bf16, timeout=LIMIT, recipe=recipe, layout=layout, folder=str(tmp_path))[0]
    assert_same_bits(load(tmp_path / "master", dtype="auto"), weights)
    assert_same_bits(
        load(tmp_path / "computed", dtype="auto"), {name: weight.bfloat16() for name, weight in weights.items()}
    )


def save_over(folder: str) -> tuple[bool, str]:
    """A large export, a small one over it, one that is turned off, and one that cannot be written."""
    layout = Layout(world=2, etp=2, stage=3)
    engine = make_engine(Recipe(), layout)
    ds_etp.save_pretrained(engine, f"{folder}/twice", max_shard_size="20KB")
    engine.save_16bit_model(f"{folder}/twice")
    with pytest.raises(CheckpointError) as refused:
        ds_etp.save_pretrained(engine, f"{folder}/file")
    engine.destroy()
    off = (("zero_optimization", {"stage3_gather_16bit_weights_on_model_save": False}),)
    engine = make_engine(Recipe(), Layout(world=2, etp=2, stage=3, extra=off))
    saved = engine.save_16bit_model(f"{folder}/off")
    engine.destroy()
    return saved, str(refused.value)


def test_what_is_there_already(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for saved, refusal in launcher.run(2, save_over, timeout=LIMIT, folder=str(tmp_path)):
        assert saved is False
        assert f"{tmp_path}/file" in refusal
    assert not (tmp_path / "off").exists()
    # The index of the larger one would be ignored, its files would not.
    names = {path.name for path in (tmp_path / "twice").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert_same_bits(load(tmp_path / "twice"), Recipe().model().state_dict())
