"""`ds_etp.from_pretrained` gives an engine the weights that load-then-shard gives it, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_etp
from ds_etp.experts.sharded import expert_parameters
from tests.export.test_families import CONFIGS  # with GraniteMoE
from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, ds_config, full_tensors, run_steps, weight
from tests.tolerances import assert_equal_runs

assert "granitemoe" in CONFIGS
EP = Layout(world=4, etp=2, ep=2)
WIDE = Layout(world=4, tp=2, etp=4)
TWICE = Layout(world=4, tp=2, etp=2)  # every shard on two ranks
LIMIT = 180


def engine_of(model: Any, config: dict[str, Any]) -> Any:
    """An engine with a loaded model, in training mode."""
    model.train()
    return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]


def loaded(folder: str, recipe: Recipe, layout: Layout, sliced: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The full weights of an engine, and what this rank has of them; loaded by us, or by transformers."""
    ds_etp.register()
    config = ds_config(recipe, layout)
    load = ds_etp.from_pretrained if sliced else plainly
    engine = engine_of(load(folder, config, experts_implementation="eager"), config)
    own = {name: weight(p).clone() for name, p in engine.module.named_parameters()}
    own |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    assert {name for name, _ in expert_parameters(engine.module)}
    full = full_tensors(engine, weight)
    engine.destroy()
    return full, own


def plainly(folder: str, config: dict[str, Any], **arguments: Any) -> Any:
    """What transformers loads."""
    return AutoModelForCausalLM.from_pretrained(folder, **arguments)


@pytest.mark.sample("mixtral-layouts1", "gpt_oss-layouts4")
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        # The hub has one tensor for each expert and projection.
        ("mixtral", [EP, replace(WIDE, stage=0), replace(TWICE, stage=2, dtype="bf16")]),
        ("mixtral", [replace(EP, stage=3, dtype="bf16"), replace(TWICE, stage=3)]),
        ("qwen3_moe", [WIDE, replace(EP, stage=0)]),
        # Fused in the hub too, under other names.
        ("granitemoe", [EP, replace(WIDE, stage=2)]),
        # Transposed, gate and up interleaved, biases, of which one is added by one rank.
        ("gpt_oss", [replace(EP, stage=2), replace(WIDE, stage=3)]),
        # Experts of a calling convention of their own.
        ("llama4_text", [replace(EP, stage=0), WIDE]),
        # Without a gate, and a dense model of other kinds of layer.
        ("nemotron_h", [EP]),
        # Rows without weights after those of the experts.
        ("longcat_flash", [EP]),
    ],
)
def test_weights_are_the_folders(launcher: Launcher, tmp_path: Path, family: str, layouts: list[Layout]) -> None:
    recipe = Recipe(family=family)
    model = recipe.model()
    model.save_pretrained(tmp_path, max_shard_size="60KB")  # several files
    for layout in layouts:
        # DeepSpeed makes one engine with AutoTP in a process.
        arguments = {"folder": str(tmp_path), "recipe": recipe, "layout": layout}
        ours = launcher.run(4, loaded, timeout=LIMIT, sliced=True, **arguments)
        theirs = launcher.run(4, loaded, timeout=LIMIT, sliced=False, **arguments)
        for (full, own), (_, wanted) in zip(ours, theirs, strict=True):
            assert set(own) == set(wanted)
            for name, tensor in wanted.items():
                assert torch.equal(own[name], tensor), (name, layout)
            for name, parameter in model.named_parameters():
                rounded = parameter.bfloat16().float() if layout.dtype == "bf16" else parameter
                assert torch.equal(full[name], rounded), (name, layout)


def trained(folder: str, recipe: Recipe, layout: Layout, keep_alive: bool) -> Any:
    """A training that starts from a folder; `keep_alive`: as Trainer does, with transformers told of ZeRO-3."""
    config = ds_config(recipe, layout)
    alive = HfDeepSpeedConfig(config) if keep_alive else None
    model = ds_etp.from_pretrained(folder, config, experts_implementation="eager", progress=False)
    engine = engine_of(model, config)
    run = run_steps(engine, recipe, layout)
    engine.destroy()
    del alive
    return run if dist.get_rank() == 0 else None


@pytest.mark.sample(2, 3)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", TWICE),
        ("mixtral", replace(EP, stage=3)),
        ("mixtral", replace(TWICE, stage=3)),
        ("mixtral", Layout(4, etp=2, stage=3, extra=(("zero_optimization", {"offload_param": {"device": "cpu"}}),))),
        ("gpt_oss", replace(EP, stage=2)),
        ("qwen3_moe", WIDE),
    ],
    ids=str,
)
def test_training(launcher: Launcher, tmp_path: Path, family: str, layout: Layout) -> None:
    recipe = Recipe(family=family, dp=layout.dp, steps=2)
    recipe.model().save_pretrained(tmp_path)
    arguments = {"folder": str(tmp_path), "recipe": recipe, "layout": layout, "keep_alive": layout.stage == 3}
    run = launcher.run(4, trained, timeout=LIMIT, **arguments)[0]
    assert_equal_runs(run, train_unsharded(recipe))


def in_types(folder: str, layout: Layout) -> list[dict[str, Tensor]]:
    """The model's own type, another one, and the engine's back from that; embeddings are tied."""
    found = []
    for dtype, changes in ((None, {}), ("fp32", {"bf16": {"enabled": False}}), ("fp32", {})):
        config = {**ds_config(Recipe(), layout), **changes}
        model = ds_etp.from_pretrained(folder, config, dtype=dtype, experts_implementation="eager")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.generation_config.max_new_tokens == 5
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if dtype is None else torch.float32}
        engine = engine_of(model, config)
        assert engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
        found.append(full_tensors(engine, weight))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_types_ties_and_generation(launcher: Launcher, tmp_path: Path, stage: int) -> None:
    """A folder in bf16, loaded as it is and as fp32."""
    model = Recipe(changes=(("tie_word_embeddings", True),)).model().to(torch.bfloat16)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path)
    layout = Layout(world=2, etp=2, stage=stage, dtype="bf16")
    for weights in launcher.run(2, in_types, folder=str(tmp_path), layout=layout)[0]:
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter.float()), name
