"""Rows that come expert by expert: the grouped forward with and without its sorting, and where it has a say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_etp.experts.layout import ExpertsLayout
from ds_etp.experts.registry import read_layout
from ds_etp.patches.transformers import grouped_mm as sorted_experts
from ds_etp.patches.transformers.grouped_mm import host_fault, sorted_forward
from tests.models import make_model

# Every kind that flags of `use_experts_implementation` tell apart: gated, gated with biases and transposed weights
# whose columns alternate, transposed, and without a gate.
KINDS = ("mixtral", "gpt_oss", "aria_text", "nemotron_h")


def experts_of(family: str, implementation: str = "grouped_mm") -> tuple[nn.Module, ExpertsLayout]:
    """The first experts module of a small model, with biases that are no zeros, and its layout."""
    model = make_model(family, implementation=implementation)
    path, module = next((path, m) for path, m in model.named_modules() if path.endswith(".experts"))
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return module, read_layout(path, module)


def run(module: nn.Module, forward: Any, x: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Outputs, and gradients of rows, weights and parameters."""
    module.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = forward(x, index, weights)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * factors).sum().backward()
    found = [out, x.grad, weights.grad, *[parameter.grad for parameter in module.parameters()]]
    return [tensor.detach().clone() for tensor in found if tensor is not None]


@pytest.mark.parametrize("rows", [[3, 0, 5, 1], [0, 0, 0, 1], [0, 7, 2, 0]], ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_as_the_familys_own(family: str, rows: list[int]) -> None:
    """Some experts have no rows."""
    module, layout = experts_of(family)
    counts = torch.tensor(rows + [0] * (layout.num_experts - len(rows)))
    index = torch.arange(layout.num_experts).repeat_interleave(counts)[:, None]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(index), 32, generator=generator)
    weights = torch.rand(len(index), 1, generator=generator)
    forward = sorted_forward(module)
    assert forward is not None
    found = run(module, lambda *rows: forward(*rows, False), x, index, weights)
    wanted = run(module, module, x, index, weights)
    assert len(found) == len(wanted) == 3 + len(list(module.parameters()))
    for one, other in zip(found, wanted, strict=True):
        # The same products; torch.sort is free to put an expert's rows in another order, and sums with them.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_only_where_the_family_would_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = experts_of("mixtral")
    assert sorted_forward(module) is not None
    for implementation in ("eager", "batched_mm"):
        assert sorted_forward(experts_of("mixtral", implementation)[0]) is None
    module.has_post_expert_norm = True  # type: ignore[assignment]
    assert sorted_forward(module) is None
    module.has_post_expert_norm = False  # type: ignore[assignment]
    # A class of the user's, with more to do.
    family = type(module)
    module.__class__ = type("Scaled", (family,), {"forward": lambda self, *rows: 2 * family.forward(self, *rows)})
    assert sorted_forward(module) is None
    module.__class__ = type("Renamed", (family,), {})
    # A release whose multiplication is called otherwise, and an implementation of the user's under the same name.
    with monkeypatch.context() as changed:
        changed.setattr(sorted_experts.moe, "_grouped_linear", lambda rows, weights: rows)
        assert sorted_forward(module) is None
        assert host_fault() == "has _grouped_linear(rows, weights), not (input, weight, offs, bias, is_transposed)"
    for name in sorted_experts._NAMES:
        with monkeypatch.context() as changed:
            changed.delattr(sorted_experts.moe, name)
            assert host_fault() == f"has no {name}"
            assert sorted_forward(module) is None or name == "use_experts_implementation"
    with monkeypatch.context() as changed:
        changed.setitem(sorted_experts.moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", lambda *_: None)
        assert sorted_forward(module) is None
    assert sorted_forward(module) is not None


def test_a_decorator_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its forward chooses otherwise, or says less of a module."""
    assert host_fault() == ""
    decorator = sorted_experts.moe.use_experts_implementation

    def without_gate(kind: Any) -> Any:
        made = decorator(kind)
        return type("Other", (made,), {"__init__": lambda self, config: made.__init__(self, config) or delete(self)})

    def delete(module: Any) -> None:
        del module.has_gate

    monkeypatch.setattr(sorted_experts.moe, "use_experts_implementation", lambda kind: kind)
    assert host_fault() == "chooses an experts implementation in another way (use_experts_implementation)"
    monkeypatch.setattr(sorted_experts.moe, "use_experts_implementation", without_gate)
    assert host_fault() == "puts no has_gate on experts modules"
