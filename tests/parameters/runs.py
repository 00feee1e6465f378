"""What the cases have in common: layouts, recipes whose experts are doubled, and reading in a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_etp
from tests.oracle import Recipe
from tests.sharded import Layout

# Every ZeRO stage that keeps weights in another way, with experts cut, dealt out, and cut beside split attention; with
# and without replicas of an expert shard (edp 2).
LAYOUTS = [
    Layout(2, etp=2, stage=0),
    Layout(4, etp=2, stage=2),
    Layout(4, etp=2, stage=3, zero_init=True),
    Layout(4, ep=2, stage=0),
    Layout(2, ep=2, stage=2),
    Layout(2, ep=2, stage=3),
    Layout(2, tp=2, etp=2, stage=0),
    Layout(4, tp=2, etp=2, stage=2),
    Layout(4, tp=2, etp=2, stage=3),
    Layout(2, ep=2, stage=2, dtype="bf16"),
    Layout(2, tp=2, etp=2, stage=3, dtype="bf16"),
]


def named(layout: Layout) -> str:
    """A case's name."""
    return f"w{layout.world}-tp{layout.tp}-etp{layout.etp}-ep{layout.ep}-zero{layout.stage}-{layout.dtype}"


def is_doubled(name: str) -> bool:
    """Experts, attention's projections, which AutoTP cuts, and something that nothing cuts."""
    return ".experts." in name or "_proj.weight" in name or name.endswith("input_layernorm.weight")


@dataclass(frozen=True)
class Doubled(Recipe):
    """The recipe's model with some parameters doubled, as the edits of a case leave it."""

    def model(self) -> Any:
        """See `Recipe.model`."""
        model = super().model()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_doubled(name):
                    parameter.mul_(2)
        return model


def weights_of(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Copies of a model's parameters by name."""
    return {name: parameter.detach().to(dtype, copy=True) for name, parameter in model.named_parameters()}


def read(engine: Any, **options: Any) -> dict[str, Tensor | None]:
    """Everything that `full_parameters` gives."""
    return dict(ds_etp.full_parameters(engine, **options))


def differing(got: dict[str, Any], wanted: dict[str, Tensor]) -> list[str]:
    """Names whose tensors aren't the same bits, in the same order."""
    if list(got) != list(wanted):
        return [f"names: {set(got) ^ set(wanted) or 'in another order'}"]
    return [
        f"{name}: {tuple(got[name].shape)} {got[name].dtype}"
        for name, tensor in wanted.items()
        if got[name].dtype != tensor.dtype or not torch.equal(got[name].cpu(), tensor)
    ]
