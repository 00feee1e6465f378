"""The same training in one process, unsharded, in plain PyTorch: what every sharded run has to equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.models import make_batch, make_model, pin_experts, set_score_biases
from tests.variants import VARIANTS

# AdamW divides each entry by its own size, down to eps. With the usual 1e-8 an entry whose gradient is all
# rounding takes a full step in a random direction, in any two runs that sum in another order. Typical
# clipped entries are about 1e-3 here, so this eps leaves those adaptive and the rounding small.
ADAM_EPS = 1e-3


@dataclass(frozen=True)
class Recipe:
    """What is trained, apart from how it is split. Hashable, so that an oracle run is done once.

    Attributes:
        family, implementation: the model and its experts implementation.
        optimizer: `sgd` (a large rate, so that a wrong scale shows) or `adamw`.
        dp: data-parallel ranks; each has batches of its own.
        lengths: sequence length by data-parallel rank, for uneven batches; 12 for all where empty.
        rows: sequences a micro batch.
        clip: the gradient clipping threshold; 0 for none.
        changes: changes to the model's config, as items.
        loss: `labels` for the model's own; `logits` for one that a single token has too.
        pinned: expert indices that every token is sent to, whatever its router says.
        checkpointing: activation checkpointing, `reentrant` or `plain`; nothing where empty.
        frozen: parameters that don't train: `experts`, `dense` (all others), or none.
        variant: experts of another shape than the family's, by their name in `tests.variants`.
        padding: positions of left padding, by row, in turn over the rows of all data-parallel ranks.
        score_bias: how far the routers' score-correction biases go from zero.
        noise_seed: seeds torch before each forward, by micro batch and data-parallel rank; not where None.
    """

    family: str = "mixtral"
    optimizer: str = "sgd"
    dp: int = 1
    steps: int = 3
    accumulate: int = 1
    clip: float = 0.5
    lengths: tuple[int, ...] = ()
    rows: int = 2
    implementation: str = "eager"
    changes: tuple[tuple[str, Any], ...] = ()
    seed: int = 7
    loss: str = "labels"
    pinned: tuple[int, ...] = ()
    checkpointing: str = ""
    frozen: str = ""
    variant: str = ""
    padding: tuple[int, ...] = ()
    score_bias: float = 0.0
    noise_seed: int | None = None

    def model(self) -> Any:
        """The model at its start."""
        model = make_model(self.family, self.seed, self.implementation, **dict(self.changes))
        if self.variant:
            VARIANTS[self.variant](model)
        if self.pinned:
            pin_experts(model, self.pinned)
        if self.score_bias:
            set_score_biases(model, self.score_bias)
        if self.frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad = (".experts." in name) != (self.frozen == "experts")
            # Plain ZeRO-3 too drops a module's weights before its gradient where no input has one.
            model.enable_input_require_grads()
        if self.checkpointing:
            arguments = {"use_reentrant": self.checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
            model.enable_input_require_grads()
        return model

    def compute_loss(self, model: Any, batch: dict[str, Tensor], routers: list[Any] | None = None) -> Tensor:
        """The loss of one micro batch; `model` may be an engine. What it says of its routers goes to `routers`."""
        inputs = batch if self.loss == "labels" else {"input_ids": batch["input_ids"]}
        outputs = model(**inputs)
        if routers is not None:
            said = (getattr(outputs, "aux_loss", None), *(getattr(outputs, "router_logits", None) or ()))
            routers.append([value.detach().float().cpu() for value in said if value is not None])
        loss: Tensor = outputs.loss if self.loss == "labels" else outputs.logits.float().square().mean()
        return loss

    def seed_noise(self, step: int, micro: int, data_rank: int) -> None:
        """Before a forward: the noise that it draws (Mixtral's jitter) is that of this micro batch and rank."""
        if self.noise_seed is not None:
            torch.manual_seed(self.noise_seed + 1000 * (step * self.accumulate + micro) + data_rank)

    def batch(self, step: int, micro: int, data_rank: int) -> dict[str, Tensor]:
        """One micro batch of one data-parallel rank."""
        length = self.lengths[data_rank % len(self.lengths)] if self.lengths else 12
        return make_batch(step * self.accumulate + micro, data_rank, self.rows, length, self.padding)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer, as `ds_config` has DeepSpeed make it."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.5)
        return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.1)

    def optimizer_config(self) -> dict[str, Any]:
        """The same for DeepSpeed's config."""
        if self.optimizer == "sgd":
            return {"type": "SGD", "params": {"lr": 0.5}}
        params = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": ADAM_EPS, "weight_decay": 0.1, "torch_adam": True}
        return {"type": "AdamW", "params": params}


@dataclass
class Run:
    """What a training did. Gradients are those of the last step, before clipping.

    `routers` holds, by forward, the auxiliary loss, where the model has one, and the router logits of every layer:
    of all data-parallel ranks in turn in an oracle run, of this rank's own in a sharded one.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    routers: list[list[Tensor]] = field(default_factory=list)


@cache
def train_unsharded(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Run:
    """Trains the recipe in this process. The loss is the mean over data-parallel ranks and micro batches."""
    model = recipe.model().to(dtype).train()
    optimizer = recipe.make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    run = Run()
    for step in range(recipe.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(recipe.accumulate):
            for data_rank in range(recipe.dp):
                recipe.seed_noise(step, micro, data_rank)
                loss = recipe.compute_loss(model, recipe.batch(step, micro, data_rank), run.routers)
                (loss / (recipe.dp * recipe.accumulate)).backward()
                total += loss.item() / (recipe.dp * recipe.accumulate)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        run.grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norm = torch.stack([grad.float().norm() for grad in run.grads.values()]).norm()
        run.losses.append(total)
        run.norms.append(norm.item())
        if recipe.clip:
            factor = torch.clamp(recipe.clip / (norm + 1e-6), max=1.0)
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
        optimizer.step()
    run.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return run
