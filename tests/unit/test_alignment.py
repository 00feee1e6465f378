"""Shards that grouped_mm can't multiply run the family's own forward: which they are, and that no other module does."""

from __future__ import annotations

import pytest
import torch

from ds_etp import Topology
from ds_etp.experts.build import misaligned_shards
from ds_etp.experts.registry import read_layout
from ds_etp.patches.transformers.experts_interface import run_eagerly
from tests.models import make_model

PATHS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]


@pytest.mark.parametrize(("itemsize", "etp", "fits"), [(4, 4, True), (2, 4, False), (2, 2, True), (None, 8, False)])
def test_grouped_mm(itemsize: int | None, etp: int, fits: bool) -> None:
    """I is 16: a row of a quarter has 16 bytes in fp32, 8 in bf16. Eager has no such limit, nor any other."""
    model = make_model("mixtral", implementation="grouped_mm")
    layouts = {path: read_layout(path, model.get_submodule(path)) for path in PATHS}
    paths, warning = misaligned_shards(model, layouts, Topology(8, etp=etp), itemsize)
    assert paths == ([] if fits else PATHS)
    if not fits:
        assert warning.startswith(f"{PATHS[0]} (2 in all): etp {etp} leaves {16 // etp} of 16 columns, 8 bytes a row")
    model.set_experts_implementation("eager")
    assert misaligned_shards(model, layouts, Topology(16, etp=16), 2) == ([], "")


@pytest.mark.parametrize(("columns", "dtype"), [(4, torch.float32), (2, torch.float32), (4, torch.bfloat16)])
def test_torch_has_that_rule(columns: int, dtype: torch.dtype) -> None:
    x, weights = torch.randn(3, columns).to(dtype), torch.randn(2, 8, columns).to(dtype)
    offsets = torch.tensor([1, 3], dtype=torch.int32)
    if columns * dtype.itemsize % 16 == 0:
        torch.nn.functional.grouped_mm(x, weights.mT, offs=offsets)
        return
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        torch.nn.functional.grouped_mm(x, weights.mT, offs=offsets)


def test_one_module_runs_eagerly() -> None:
    """Whatever the model is told later, and without the others."""
    model = make_model("mixtral", implementation="grouped_mm")
    first, second = (model.get_submodule(path) for path in PATHS)
    run_eagerly(first)
    assert second.config._experts_implementation == model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("batched_mm")
    assert first.config._experts_implementation == "eager"
    assert second.config._experts_implementation == "batched_mm"
