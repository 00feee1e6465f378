"""Recipes with LoRA adapters, for the oracle and for engines alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from tests.oracle import Recipe

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _plain(value: Any) -> Any:
    """An option as PEFT wants it: recipes hold tuples, to be hashable."""
    if isinstance(value, tuple):
        return dict(value) if isinstance(value[0], tuple) else list(value)
    return value


@dataclass(frozen=True)
class LoraRecipe(Recipe):
    """A recipe whose model has LoRA adapters, filled with random numbers: with B zero, A would have no gradient.

    Attributes:
        modules, parameters: the config's `target_modules` and `target_parameters`.
        options: further entries of the config.
        second: whether there is a second adapter, active beside the first.
        input_grads: whether the embeddings' output has a gradient, as with activation checkpointing.
        train_base: whether the weights that have adapters train too.
    """

    clip: float = 0.05
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = (GATE_UP, DOWN)
    options: tuple[tuple[str, Any], ...] = ()
    second: bool = False
    input_grads: bool = True
    train_base: bool = False

    def config(self) -> LoraConfig:
        """The adapters' config."""
        return LoraConfig(
            r=3,
            # With larger products the attention of so small a model amplifies rounding a hundredfold, split or not.
            lora_alpha=1,
            target_modules=list(self.modules),
            target_parameters=list(self.parameters),
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            **{key: _plain(value) for key, value in self.options},
        )

    def adapt(self, model: Any) -> Any:
        """The model with adapters, the same from the same seed."""
        torch.manual_seed(self.seed + 1)
        model = get_peft_model(model, self.config())
        if self.second:
            model.add_adapter("second", self.config())
            model.base_model.set_adapter(["default", "second"])
        if self.train_base:
            model.requires_grad_(True)
        return model

    def model(self) -> Any:
        """See `Recipe.model`."""
        model = self.adapt(super().model())
        if self.input_grads:
            # Plain ZeRO-3 drops a module's weights before its gradient where no input has one.
            model.enable_input_require_grads()
        return model


class SeedsByRank(LoraRecipe):
    """Every rank fills its adapters with other numbers; the base model is the same, as with `from_pretrained`."""

    def adapt(self, model: Any) -> Any:
        """See `LoraRecipe.adapt`. In one process the numbers are rank 0's."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super(SeedsByRank, replace(self, seed=self.seed + rank)).adapt(model)


BOTH = LoraRecipe(modules=ATTENTION)
EXPERTS = LoraRecipe()
ONLY_DOWN = LoraRecipe(parameters=(DOWN,))
ONLY_ATTENTION = LoraRecipe(modules=ATTENTION, parameters=())
