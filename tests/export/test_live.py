"""What a live engine writes loads as an ordinary transformers model, and is the model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ds_etp
from tests.hosts import skip_if_refused
from tests.launcher import Launcher
from tests.models import make_batch
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, make_engine, run_steps
from tests.tolerances import TENSOR

# (tp, etp, ep) = (1,2,1), (2,2,2), (2,4,1), (4,2,1)
# Seconds for a case: most take one, but the first one starts the processes.
LIMIT = 300
LAYOUTS = [
    Layout(world=2, etp=2),
    Layout(world=4, tp=2, etp=2, ep=2),
    Layout(world=4, tp=2, etp=4),
    Layout(world=4, tp=4, etp=2),
]


def load(folder: Path, **arguments: Any) -> Any:
    """The model in a folder; asserts that no key was missing, unexpected or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **arguments)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], f"{kind}: {info[kind]}"
    return model.eval()


def assert_same_bits(got: Any, wanted: dict[str, torch.Tensor]) -> None:
    """Every tensor of a model, by name."""
    found = got.state_dict()
    assert set(found) == set(wanted)
    for name, reference in wanted.items():
        assert found[name].dtype == reference.dtype, name
        assert torch.equal(found[name], reference), f"{name} differs"


def assert_same_logits(got: Any, wanted: Any) -> None:
    """The two models' answers to one batch, after training that summed in another order."""
    ids = make_batch(99, 0)["input_ids"]
    with torch.no_grad():
        a, b = got(input_ids=ids).logits.float(), wanted(input_ids=ids).logits.float()
    assert ((a - b).abs().max() / b.abs().max()).item() <= TENSOR


def trained(recipe: Recipe) -> Any:
    """The recipe's model after its steps, unsharded."""
    model = recipe.model().eval()
    model.load_state_dict(train_unsharded(recipe).weights, strict=False)
    model.tie_weights()
    return model


def save_before_and_after(recipe: Recipe, layout: Layout, folder: str) -> Any:
    """Writes the model at its start and after the recipe's steps, each in its own way."""
    import deepspeed

    engine = make_engine(recipe, layout)
    returned = engine.save_16bit_model(f"{folder}/start")
    run = run_steps(engine, recipe, layout)
    ds_etp.save_pretrained(engine, f"{folder}/end", max_shard_size="20KB")
    ds_etp.save_pretrained(engine, f"{folder}/bf16", dtype="bf16")
    assert deepspeed.comm.is_initialized()
    engine.destroy()
    return returned, run.weights


@pytest.mark.sample("tp1-etp2-ep1-0", "tp2-etp2-ep2-1", "tp2-etp4-ep1-2", "tp4-etp2-ep1-3")
@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        pytest.param(
            layout,
            stage,
            id=f"tp{layout.tp}-etp{layout.etp}-ep{layout.ep}-{stage}",
            marks=[pytest.mark.compat] if (LAYOUTS.index(layout), stage) in ((0, 0), (0, 2), (1, 1)) else [],
        )
        for stage, layout in itertools.product(range(4), LAYOUTS)
    ],
)
def test_every_layout_and_stage(launcher: Launcher, tmp_path: Path, layout: Layout, stage: int) -> None:
    layout = Layout(layout.world, layout.tp, layout.etp, layout.ep, stage=stage)
    skip_if_refused(layout)
    recipe = Recipe(dp=layout.dp, steps=2)
    results = launcher.run(
        layout.world, save_before_and_after, timeout=LIMIT, recipe=recipe, layout=layout, folder=str(tmp_path)
    )
    assert [returned for returned, _ in results] == [True] * layout.world
    assert_same_bits(load(tmp_path / "start"), recipe.model().state_dict())
    end = load(tmp_path / "end")
    assert_same_bits(end, results[0][1])
    assert_same_logits(end, trained(recipe))
    assert_same_bits(
        load(tmp_path / "bf16", dtype=torch.bfloat16),
        {name: weight.to(torch.bfloat16) for name, weight in results[0][1].items()},
    )
    assert load(tmp_path / "bf16", dtype="auto").dtype == torch.bfloat16
    assert len(list((tmp_path / "end").glob("model-*-of-*.safetensors"))) > 2
