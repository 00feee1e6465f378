"""Which blocks say in their source that shared experts may run early."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ds_etp.experts.blocks import find_shared_experts
from ds_etp.experts.shared_overlap import SharedExpertOverlap, install_overlap
from tests.models import make_model


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = nn.Linear(2, 2), nn.Linear(2, 2)


class _After(_Block):
    def forward(self, x: Tensor) -> Tensor:
        kept = x
        x = self.experts(x.view(-1, 2))
        return x + self.shared(kept)


class _Before(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.experts(x)


class _Changed(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2)
        y = self.experts(x)
        return y + self.shared(x)


class _Sometimes(_Block):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        y = self.experts(x)
        if other:
            return y + self.shared(y)
        return y + self.shared(x)


class _Never(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


def test_source_decides() -> None:
    assert find_shared_experts(_After(), "experts") == "shared"
    for kind in (_Before, _Changed, _Sometimes, _Never):
        assert find_shared_experts(kind(), "experts") == "", kind.__name__


def test_families() -> None:
    """Also one whose tokens are projected before its routed experts get them (Nemotron-H)."""
    for family, path, shared in (
        ("deepseek_v3", "layers.1.mlp", "shared_experts"),
        ("deepseek_v2", "layers.1.mlp", "shared_experts"),
        ("glm4_moe", "layers.1.mlp", "shared_experts"),
        ("nemotron_h", "layers.1.mixer", "shared_experts"),
        ("qwen2_moe", "layers.0.mlp", ""),
        ("llama4_text", "layers.0.feed_forward", ""),
        ("mixtral", "layers.0.mlp", ""),
    ):
        block = make_model(family).model.get_submodule(path)
        assert find_shared_experts(block, "experts") == shared, family


def test_an_early_result_is_for_its_input_only() -> None:
    """Whatever a block gives its shared experts, it gets what they make of that."""
    block, wasted = _After(), []
    shared_overlap = SharedExpertOverlap(block.shared, lambda: wasted.append(1))
    install_overlap(block, shared_overlap)
    assert type(block).__name__ == "_After" and isinstance(block, _After)
    x = torch.randn(3, 2)
    other = torch.randn(3, 2)
    with shared_overlap.call_of_block((x,), {}):
        assert shared_overlap.overlap_fn is not None
        shared_overlap.overlap_fn()
        assert torch.equal(block.shared(other), nn.functional.linear(other, block.shared.weight, block.shared.bias))
        assert wasted == [1]
    with shared_overlap.call_of_block((x,), {}):
        assert shared_overlap.overlap_fn is not None
        shared_overlap.overlap_fn()
        early = shared_overlap._early
        assert early is not None and block.shared(x) is early[1]
    assert wasted == [1] and shared_overlap.overlap_fn is None
