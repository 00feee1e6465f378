"""A tiny random model of any family with routed experts, a batch for it, and its loss."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.discover import Family
from tests.families.shrink import EXPERTS, shrink
from tests.families.special import CHANGES, INPUTS, MODELS

# Tokens 8..87: special tokens, also those that stand for images, are outside.
TOKENS = (8, 88)
ROWS, LENGTH = 2, 8
# Of the public classes, those tried first: text models that have a loss of their own.
_PREFERRED = (r".*ForCausalLM", r".*ForConditionalGeneration", r".*For(MaskedLM|TokenClassification)", r".*TextModel")
# Matrices whose start value means something (1 in a norm, a decay): like vectors, kept, with noise on top.
_KEPT = re.compile(r"norm\.scale$|A_log$|correction_bias$")


def model_class(family: Family) -> Any:
    """The class a family is tested in."""
    if family.name in MODELS:
        return family.load(MODELS[family.name])
    for pattern in _PREFERRED:
        for name in family.models:
            if re.fullmatch(pattern, name):
                return family.load(name)
    raise LookupError(f"{family.name}: none of {family.models} is known to take text")


def make_tiny(family: Family, seed: int = 8, implementation: str = "eager") -> nn.Module:
    """A model with 2 layers of 4 experts, I = 16, fp32, in training mode.

    Args:
        family: one of `discover.families()`.
        seed: decides every weight. With the default every expert of every family is picked within 4 batches.
        implementation: the experts implementation; nothing but `eager` where the family isn't decorated.
    """
    cls = model_class(family)
    config = shrink(cls.config_class, CHANGES.get(family.name, {}))
    torch.manual_seed(seed)  # transformers draws some start values itself
    model = _build(cls, config, implementation)
    if next(model.parameters()).device.type != "meta":
        _randomize(model, seed)
    return model.train()


def _build(cls: Any, config: Any, implementation: str) -> nn.Module:
    """Builds with NaN in what no initialisation writes to: leftover memory would differ between ranks."""
    # Not to towers for images: a tower from another family refuses what it has no experts for (mistral_large4).
    chosen = {"": implementation, "text_config": implementation}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model: nn.Module = cls._from_config(config, experts_implementation=chosen)
    finally:
        torch.use_deterministic_algorithms(before)
    return model.float()


@torch.no_grad()
def _randomize(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
    for name, tensor in [*model.named_parameters(), *buffers]:
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim < 2 or _KEPT.search(name):
            # A bias, a norm: near its start value, but such that swapped entries would show.
            tensor.nan_to_num_(0.0).add_(noise, alpha=0.05)
        else:
            # Activations stay near 1. Embeddings are wider than a matrix row's share: they keep tokens apart, so
            # that they go to different experts.
            tensor.copy_(noise * (0.5 if "embed" in name else tensor.shape[-1] ** -0.5))
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # deepseek_v4: experts by token id, which checkpoints bring
            order = torch.rand(buffer.shape[0], EXPERTS, generator=generator).argsort(dim=1)
            buffer.copy_(order[:, : buffer.shape[1]])


def make_batch(family: Family, step: int, data_rank: int) -> dict[str, Tensor]:
    """One micro batch of one data-parallel rank: 2 x 8 tokens, labels alike, and what the family needs besides."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    ids = torch.randint(*TOKENS, (ROWS, LENGTH), generator=generator)
    extra = INPUTS.get(family.name)
    batch = {"input_ids": ids, "labels": ids.clone()}
    return extra(batch) if extra else batch


def compute_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss where it has one, else a smooth scalar of its outputs. `model` may be an engine."""
    output = model(**batch)
    loss: Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    logits: Tensor | None = getattr(output, "logits", None)
    result = (output[0] if logits is None else logits).float()
    # Weighted: the mean square of what a norm put out is constant.
    return (result.square() * torch.linspace(0.5, 1.5, result.shape[-1], device=result.device)).mean()
