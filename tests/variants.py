"""Mixtral's experts in other shapes than transformers gives them: as a list of modules, and as a class of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

import ds_etp
from ds_etp.experts.sharded import ShardedExperts


class Expert(nn.Module):
    """One expert, as in transformers 4."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        hidden, inner = down.shape
        self.w1, self.w2, self.w3 = (
            nn.Linear(hidden, inner, bias=False),
            nn.Linear(inner, hidden, bias=False),
            nn.Linear(hidden, inner, bias=False),
        )
        for layer, weight in zip((self.w1, self.w3, self.w2), (*gate_up.chunk(2), down), strict=True):
            layer.weight.data = weight.clone()
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """`[n, H]` to `[n, H]`."""
        out: Tensor = self.w2(self.act_fn(self.w1(x)) * self.w3(x))
        return out


class ListBlock(nn.Module):
    """An MoE block that loops over a list of experts, as in transformers 4."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = block.gate
        experts = block.experts
        pairs = zip(experts.gate_up_proj.data, experts.down_proj.data, strict=True)
        self.experts = nn.ModuleList(Expert(gate_up, down) for gate_up, down in pairs)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[B, S, H]` to `[B, S, H]`."""
        x = hidden_states.flatten(0, 1)
        _, weights, index = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return out.view_as(hidden_states)


def block_forward(block: Any, hidden_states: Tensor) -> Tensor:
    """What docs/own-experts.md has a user write for `fuse_experts`."""
    x = hidden_states.flatten(0, 1)
    _, weights, index = block.gate(x)
    out: Tensor = block.experts(x, index, weights)
    return out.view_as(hidden_states)


class OwnExperts(nn.Module):
    """Experts with parameters of their own kind, called with weights `[T, E]` that are 0 where not chosen."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        gate, up = experts.gate_up_proj.data.transpose(1, 2).chunk(2, -1)
        self.wide = nn.Parameter(torch.stack([gate, up], -1).flatten(2))  # [E, H, 2I], interleaved
        self.back = nn.Parameter(experts.down_proj.data.transpose(1, 2).contiguous())  # [E, I, H]
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, self.back[:, 0].numel()).view_as(self.back[:, 0]))  # [E, H]

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """`[T, H]` and `[T, E]` to `[T, H]`."""
        out = torch.zeros_like(x)
        for number in range(weights.shape[1]):
            gate, up = (x @ self.wide[number]).unflatten(-1, (-1, 2)).unbind(-1)
            expert = (F.silu(gate) * up) @ self.back[number] + self.shift[number]
            out = out + expert * weights[:, number, None]
        return out


class DenseWeights(ShardedExperts):
    """The adapter of `OwnExperts`."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """See `OwnExperts.forward`."""
        chosen, index = weights.topk(2)
        return super().forward(x, index, chosen)

    def local_experts_forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `ShardedExperts.local_experts_forward`."""
        dense = weights.new_zeros(len(x), len(self.wide)).scatter(1, index, weights)  # type: ignore[attr-defined]
        partial: Tensor = super(ShardedExperts, self).forward(x, dense)  # type: ignore[misc]
        return partial


def register_own_experts() -> None:
    """What docs/own-experts.md has a user write."""
    cuts = {
        "wide": ds_etp.ShardSpec(dim=2, interleave=2),
        "back": ds_etp.ShardSpec(dim=1),
        "shift": ds_etp.ShardSpec(dim=None),
    }
    ds_etp.register_layout(OwnExperts, cuts, adapter=DenseWeights)


class OwnBlock(nn.Module):
    """An MoE block around `OwnExperts`."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, OwnExperts(block.experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[B, S, H]` to `[B, S, H]`."""
        x = hidden_states.flatten(0, 1)
        _, weights, index = self.gate(x)
        dense = weights.new_zeros(len(x), self.gate.num_experts).scatter(1, index, weights)
        out: Tensor = self.experts(x, dense)
        return out.view_as(hidden_states)


def _replace_blocks(model: Any, block: Callable[[Any], nn.Module]) -> None:
    for layer in model.model.layers:
        layer.mlp = block(layer.mlp)


def as_lists(model: Any) -> None:
    """Mixtral as transformers 4 had it."""
    _replace_blocks(model, ListBlock)


def as_fused_lists(model: Any) -> None:
    """The same, fused again by ds_etp."""
    as_lists(model)
    paths = ds_etp.fuse_experts(model, {ListBlock: block_forward})
    assert paths == [f"model.layers.{number}.mlp.experts" for number in range(len(model.model.layers))]


def with_own_experts(model: Any) -> None:
    """Mixtral around `OwnExperts`."""
    _replace_blocks(model, OwnBlock)


def with_fused_loss(model: Any) -> None:
    """The model's loss from hidden states and the output layer's weight, which is never called: fused losses do so."""

    def forward(input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = model.model(input_ids).last_hidden_state[:, :-1]
        head = model.get_output_embeddings()
        logits = F.linear(hidden.to(head.weight.device), head.weight)
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))

    model.forward = forward


VARIANTS: dict[str, Callable[[Any], None]] = {
    "lists": as_lists,
    "fused lists": as_fused_lists,
    "own experts": with_own_experts,
    "fused loss": with_fused_loss,
}
