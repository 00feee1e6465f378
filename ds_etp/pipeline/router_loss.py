"""The routers' load balancing loss over layers of several pipeline stages.

`load_balancing_loss_func` of transformers adds up, over all layers and tokens, how often each expert was picked and how
likely it was, and multiplies the two sums in the end. So the sums travel with the hidden states, layer by layer.
DeepSpeed runs a backward pass for each floating-point tensor that a pipeline stage sends. The sums of probabilities,
the ones that have a gradient, therefore travel inside the hidden states, in rows of their own behind the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_etp.errors import config_error

# Parts that a number of fp32 takes in bf16 to keep all of its 24 bits.
_PARTS = 3


@dataclass(frozen=True)
class RouterSums:
    """Sums over the layers so far: of each expert's probability, fp32 `[E]`, and of its choices, int64 `[E]`."""

    prob_sums: Tensor
    counts: Tensor


@dataclass(frozen=True)
class RouterLoss:
    """Sizes of the loss.

    Attributes:
        experts, top_k: E and K.
        weight: what the loss is multiplied with before it is added to that of the tokens.
    """

    experts: int
    top_k: int
    weight: float

    def start(self, device: torch.device) -> RouterSums:
        """The sums before the first layer."""
        return RouterSums(
            torch.zeros(self.experts, device=device), torch.zeros(self.experts, dtype=torch.long, device=device)
        )

    def add(self, sums: RouterSums, logits: Tensor, mask: Tensor | None) -> RouterSums:
        """Adds one layer's router logits `[T, E]`, without the tokens that the mask `[B, S]` leaves out."""
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self.top_k, dim=-1).indices.reshape(-1)
        prob_sums = probabilities.float()
        if mask is None:
            counted = torch.ones_like(chosen)
        else:
            flat = mask.reshape(-1)
            prob_sums = prob_sums * flat[:, None].float()
            counted = flat.long().repeat_interleave(self.top_k)
        return RouterSums(sums.prob_sums + prob_sums.sum(0), sums.counts.scatter_add(0, chosen, counted))

    def value(self, sums: RouterSums) -> Tensor:
        """The loss, before its weight."""
        rows = sums.counts.sum() / self.top_k
        return torch.sum(sums.counts / rows * (sums.prob_sums / rows)) * self.experts

    def pack(self, hidden: Tensor, prob_sums: Tensor) -> Tensor:
        """Hidden states `[B, S, H]` and the sums `[E]`, as one tensor `[B, S + extra, H]` of the former's type."""
        if hidden.dtype is torch.float16:
            raise config_error(
                "fp16.enabled",
                True,
                "has no room for the sums of the routers' auxiliary loss",
                works="bf16, or config.output_router_logits False",
            )
        batch, _, width = hidden.shape
        rows = self._rows(hidden)
        parts = _Split.apply(prob_sums, hidden.dtype).flatten()
        padding = parts.new_zeros(batch * rows * width - parts.numel())
        return torch.cat([hidden, torch.cat([parts, padding]).view(batch, rows, width)], 1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """What `pack` was given."""
        rows = self._rows(packed)
        hidden, tail = packed[:, :-rows], packed[:, -rows:]
        parts = tail.flatten()[: self._parts(packed.dtype) * self.experts]
        return hidden.contiguous(), _Merge.apply(parts.view(-1, self.experts))

    def _rows(self, hidden: Tensor) -> int:
        """Extra rows of each sequence."""
        return -(-self._parts(hidden.dtype) * self.experts // (hidden.shape[0] * hidden.shape[2]))

    @staticmethod
    def _parts(dtype: torch.dtype) -> int:
        return 1 if dtype is torch.float32 else _PARTS


def _split(value: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float32:
        return value.float()[None]
    parts, rest = [], value.float()
    for _ in range(_PARTS):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts)


class _Split(torch.autograd.Function):
    """fp32 `[E]` to parts `[n, E]` of a narrower type; the gradient comes back in parts too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return _split(value, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float().sum(0), None


class _Merge(torch.autograd.Function):
    """Parts `[n, E]` to their sum in fp32."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        ctx.dtype = parts.dtype
        return parts.float().sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _split(grad, ctx.dtype)
