"""ZeRO-3 and blocks of experts that get an input without gradient.

DeepSpeed (0.19.8) treats the blocks of Mixtral, Qwen2-MoE and Qwen3-MoE as leaf modules: it reduces
the gradients of all their parameters when autograd says that the block's backward is done. Where no input has
a gradient, autograd says so at once, before there is any. That is the first block of a model whose embeddings
and attention are frozen, as with LoRA on the experts alone; it fails with sizes that don't match. An input that
asks for a gradient puts it right. Can go when DeepSpeed waits for the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn


def require_input_grads(blocks: Iterable[nn.Module]) -> None:
    """Makes the inputs of these blocks ask for a gradient while they are trained as leaf modules.

    Before DeepSpeed registers its own hooks, which have to see the input as it is then.
    """
    for block in blocks:
        block.register_forward_pre_hook(_ask_for_gradients, with_kwargs=True)


def _ask_for_gradients(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters())
    if not trained or not z3_leaf_module(block) or any(tensor.requires_grad for tensor in inputs):
        return None
    return tuple(map(_asking, args)), {name: _asking(value) for name, value in kwargs.items()}


def _asking(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value
