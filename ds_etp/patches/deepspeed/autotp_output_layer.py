"""AutoTP leaves the output layer whole where code reads its weight instead of calling it.

A fused (chunked) linear cross entropy multiplies hidden states with `lm_head.weight` itself: TRL's trainers (1.16),
Liger's and Cut Cross Entropy's forwards do. AutoTP (deepspeed 0.19.5 to 0.19.8) gives each tensor-parallel rank a part
of the vocabulary and expects the layer to be called, which gathers the logits. A reader of the weight takes the part
for the whole: its loss is that of a part of the vocabulary. A whole output layer gets hidden states that
tensor-parallel ranks hold alike, so its gradient is whole on each of them, as a norm's is. It can go when AutoTP's
layers tell readers of their weight.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_tp import AutoTP
from torch import nn

from ds_etp.errors import config_error
from ds_etp.log import logger
from ds_etp.patches.base import swapped
from ds_etp.patches.peft.expert_lora import is_peft_model

KEY = "expert_tensor_parallel.replicate_lm_head"
_TIED = "_is_vocab_parallel_lm_head"
# Of a weight, what is the same for a part of it and the whole, in the sense that nothing is computed from it.
_HARMLESS = ("dtype", "device", "requires_grad")


def output_layers(model: Any) -> dict[str, nn.Module]:
    """The layers that make logits, by path; more than one where an adapter wraps it. Empty where a model has none."""
    inner = model.get_base_model() if is_peft_model(model) else model
    find = getattr(inner, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        return {}
    inside = {id(module) for module in head.modules() if isinstance(getattr(module, "weight", None), torch.Tensor)}
    return {path: module for path, module in model.named_modules() if id(module) in inside}


def reads_output_weight(model: Any) -> str | None:
    """The function that computes with the output layer's weight when the model is called, as `module.name`, if any.

    It looks at the code of the model's forward: that the layer is there by name, and that a `weight` is taken of which
    more than the dtype or the device is asked.
    """
    inner = model.get_base_model() if is_peft_model(model) else model
    heads = {path.rpartition(".")[2] for path in output_layers(inner)} | {"get_output_embeddings"}
    for function in _functions(inner.forward):
        if any(_takes_weight(code) and heads & set(code.co_names) for code in _codes(function.__code__)):
            name = getattr(function.__code__, "co_qualname", function.__qualname__)  # without it before Python 3.11
            return f"{function.__globals__.get('__name__')}.{name}"
    return None


def _functions(function: Any) -> Iterator[Any]:
    """A function and those it wraps, or closes over."""
    pending, seen = [function], set()
    while pending:
        function = pending.pop(0)
        function = getattr(function, "__func__", function)
        function = getattr(function, "func", function)  # a partial
        function = getattr(function, "__func__", function)
        if id(function) in seen or not hasattr(function, "__code__"):
            continue
        seen.add(id(function))
        yield function
        cells = [cell for cell in function.__closure__ or () if cell != type(cell)()]
        pending += [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
        pending.append(getattr(function, "__wrapped__", None))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _takes_weight(code: CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    return any(
        step.opname == "LOAD_ATTR" and step.argval == "weight" and after.argval not in _HARMLESS
        for step, after in pairwise(steps)
    )


@contextmanager
def whole_output_layer(model: Any, wanted: bool | str, ds_config: Mapping[str, Any]) -> Iterator[None]:
    """While AutoTP partitions `model`, keeps it from splitting the output layer.

    Args:
        wanted: the key of the block; `"auto"`: if the model's forward reads that layer's weight.
        ds_config: the raw DeepSpeed config. Its `tensor_parallel.vocab_parallel_lm_head` splits that layer on purpose.

    Raises:
        ConfigError: both are wanted.
    """
    reader = reads_output_weight(model) if wanted == "auto" else None
    if not (wanted is True or reader):
        yield
        return
    if ds_config.get("tensor_parallel", {}).get("vocab_parallel_lm_head"):
        raise config_error(
            "tensor_parallel.vocab_parallel_lm_head",
            True,
            f"splits the output layer, whose weight {reader} reads whole" if reader else f"contradicts {KEY}=true",
            works="false",
        )
    layers = output_layers(model)
    heads = {id(module) for module in layers.values()}
    if reader and dist.get_rank() == 0:
        logger().info("%s reads the weight of %s, so it stays whole on each rank", reader, ", ".join(layers))

    def skipping(original: Callable[..., Any]) -> Callable[..., Any]:
        def replace(self: Any, child: Any, *args: Any, **kwargs: Any) -> Any:
            return child if id(child) in heads else original(self, child, *args, **kwargs)

        return replace

    # Over what others have put there for the same while, adapters_split_with_layers.
    with (
        swapped(AutoTP, "_replace", skipping),
        swapped(AutoTP, "_replace_with_config", skipping),
        # Its own choice for tied embeddings (from 0.19.5 on), without being asked, is the same split.
        swapped(AutoTP, _TIED, lambda _: lambda self, child, name: False) if hasattr(AutoTP, _TIED) else nullcontext(),
    ):
        yield
