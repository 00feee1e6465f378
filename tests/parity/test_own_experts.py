"""Experts that transformers doesn't have: a registered class, and lists of modules that are fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ds_etp
from tests.launcher import CaseFailed, Launcher
from tests.models import make_model
from tests.oracle import Recipe, Run, train_unsharded
from tests.sharded import Layout, make_engine, run_steps, train
from tests.tolerances import assert_equal_runs
from tests.variants import ListBlock, as_fused_lists, as_lists, block_forward, register_own_experts

# (tp, etp, ep, stage) on four ranks.
SPLITS = [(1, 2, 2, 1), (2, 4, 1, 1), (2, 2, 2, 2), (1, 4, 1, 3), (1, 2, 2, 0)]


def train_own(recipe: Recipe, layout: Layout) -> Run | None:
    """As a user with experts of their own does."""
    register_own_experts()
    return train(recipe, layout)


@pytest.mark.sample("split1", "split3")
@pytest.mark.parametrize("split", SPLITS)
def test_a_registered_class(launcher: Launcher, split: tuple[int, int, int, int]) -> None:
    """Interleaved gate and up, a bias that is added once, and a calling convention of its own."""
    tp, etp, ep, stage = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    recipe = Recipe(dp=layout.dp, variant="own experts", changes=(("output_router_logits", False),))
    run = launcher.run(4, train_own, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


def test_a_class_that_is_not_registered(launcher: Launcher) -> None:
    recipe = Recipe(variant="own experts", changes=(("output_router_logits", False),))
    with pytest.raises(CaseFailed, match=r"OwnExperts.*ds_etp\.register_layout"):
        launcher.run(2, forget_and_train, recipe=recipe, layout=Layout(world=2, etp=2))


def forget_and_train(recipe: Recipe, layout: Layout) -> Run | None:
    """The workers are reused: an earlier case may have registered the class."""
    from ds_etp.experts import registry as families

    families._ROWS.pop("tests.variants.OwnExperts", None)
    return train(recipe, layout)


@pytest.mark.sample("split2")
@pytest.mark.parametrize("split", SPLITS)
def test_fused_lists_train_as_the_family_does(launcher: Launcher, split: tuple[int, int, int, int]) -> None:
    tp, etp, ep, stage = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    recipe = Recipe(dp=layout.dp, changes=(("output_router_logits", False),))
    fused = Recipe(dp=layout.dp, changes=(("output_router_logits", False),), variant="fused lists")
    run = launcher.run(4, train, recipe=fused, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


def test_a_list_says_how_to_fuse_it(launcher: Launcher) -> None:
    with pytest.raises(CaseFailed, match=r"a list of 4 modules.*ds_etp\.fuse_experts"):
        launcher.run(2, train, recipe=Recipe(variant="lists"), layout=Layout(world=2, etp=2))


def save_fused(folder: str) -> dict[str, torch.Tensor] | None:
    """Trains fused lists and writes them."""
    recipe = Recipe(dp=2, variant="fused lists", steps=2)
    layout = Layout(world=2, etp=2, stage=1)
    engine = make_engine(recipe, layout)
    run = run_steps(engine, recipe, layout)
    ds_etp.save_pretrained(engine, folder)
    engine.destroy()
    return run.weights


def test_fused_lists_are_taken_apart_on_export(launcher: Launcher, tmp_path: Path) -> None:
    weights = launcher.run(2, save_fused, folder=str(tmp_path))[0]
    stored = load_file(tmp_path / "model.safetensors")
    model: Any = make_model("mixtral")
    as_lists(model)
    # What is written is what the unfused model is called, Mixtral's own renaming of its blocks apart.
    listed = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in model.state_dict().items()}
    assert set(stored) == set(listed)
    experts = "model.layers.1.block_sparse_moe.experts"
    fused = weights["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(stored[f"{experts}.2.w3.weight"], fused[2].chunk(2)[1])


class Shrunk(nn.Module):
    """An expert that doesn't compute what its layers' names suggest."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, H]` to `[n, H]`."""
        out: torch.Tensor = self.w2(self.act_fn(self.w1(x)) * self.w3(x)) / 2
        return out


def test_what_cannot_be_fused() -> None:
    model: Any = make_model("mixtral")
    with pytest.raises(ds_etp.ConfigError, match="names no block of MixtralForCausalLM"):
        ds_etp.fuse_experts(model, {ListBlock: block_forward})
    as_lists(model)
    layers = model.model.layers
    for experts, reason in (
        ([Shrunk(), Shrunk()], "computes something else"),
        ([nn.Sequential(nn.Linear(4, 4))], "none of"),
        ([layers[0].mlp.experts[0], Shrunk()], "differ in shape"),
    ):
        layers[1].mlp.experts = nn.ModuleList(experts)
        with pytest.raises(ds_etp.ConfigError, match=reason):
            ds_etp.fuse_experts(model, {ListBlock: block_forward})
        assert type(layers[0].mlp) is ListBlock, "the other layer was fused"


def test_fusing_keeps_what_is_computed() -> None:
    listed, fused = make_model("mixtral"), make_model("mixtral")
    as_lists(listed)
    as_fused_lists(fused)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(fused(input_ids=ids).logits, listed(input_ids=ids).logits)
