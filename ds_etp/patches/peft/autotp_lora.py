"""AutoTP splits a LoRA layer's adapters together with the layer.

AutoTP (deepspeed 0.19.8) takes PEFT's wrapper of `q_proj` for the layer itself, since it has its
weight, and puts a split layer of that weight in its place. The adapters are gone: they don't act, get no
gradient, aren't saved, and nothing says so. Here the layer inside is split, and of the two adapters the one on
the side that is cut: B's rows with a column-parallel layer, A's columns with a row-parallel one. Can go when
AutoTP looks into wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.module_inject import auto_tp as host
from torch import nn

from ds_etp.errors import config_error
from ds_etp.patches.base import swapped
from ds_etp.patches.deepspeed.autotp import hf_tp_plan
from ds_etp.patches.peft.expert_lora import is_wrapper


def check_split_layers(model: nn.Module, tp: int, ds_config: Mapping[str, Any]) -> None:
    """Refuses adapters on layers that AutoTP may split and this module can't split with them.

    Args:
        tp: tensor parallel size of the dense path.
        ds_config: the raw DeepSpeed config.

    Raises:
        ConfigError: names the layer and what works.
    """
    if tp <= 1:
        return
    settings = ds_config.get("tensor_parallel", {})
    has_plan = bool(settings.get("partition_config") or settings.get("preset_model") or hf_tp_plan(model))
    for path, module in model.named_modules():
        if not is_wrapper(module) or not _may_be_split(module):
            continue
        reason = _unknown(path, module)
        if reason is None and not has_plan:
            reason = "has adapters, and neither the model (tp_plan) nor tensor_parallel.partition_config names it"
        if reason is not None:
            raise config_error(
                "tensor_parallel.autotp_size",
                tp,
                f"cannot split {path}: it {reason}",
                works="1, or plain LoRA on linear layers of a model with a tp_plan",
            )


def _may_be_split(module: Any) -> bool:
    inner = module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module
    return isinstance(inner, nn.Linear | nn.Embedding)


def _unknown(path: str, module: Any) -> str | None:
    """Why a wrapper can't be split, as the rest of a sentence; None where it can."""
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or not isinstance(module.base_layer, nn.Linear):
        return f"is wrapped by PEFT as {type(module).__name__}"
    if module.lora_variant:
        return f"has a variant of LoRA, {type(next(iter(module.lora_variant.values()))).__name__}"
    if path.rpartition(".")[2] in ("lm_head", "embed_out"):
        return "is the output layer, for which AutoTP has ways of its own"
    return None


@contextmanager
def adapters_split_with_layers(model: nn.Module) -> Iterator[None]:
    """While AutoTP partitions `model`, makes it look into PEFT's wrappers."""
    wrappers = {id(module) for module in model.modules() if is_wrapper(module)}
    if not wrappers:
        yield
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _replace_with_config(self: Any, child: Any, name: str) -> Any:
            if id(child) not in wrappers:
                return original(self, child, name)
            spec = self.partition_config.find_matching_spec(f"{name}.weight", self._get_model_type())
            if spec is not None and spec.partition_type != host.PartitionType.SKIP:
                if spec.shape is not None:
                    raise config_error(
                        "tensor_parallel.partition_config",
                        spec.patterns,
                        f"gives a shape to {name}, whose adapters cannot be cut by it",
                        works="an entry without a shape, or no adapters there",
                    )
                row = spec.partition_type == host.PartitionType.ROW
                adapters = child.lora_A if row else child.lora_B
                owners = [(child, "base_layer"), *((adapters, adapter) for adapter in adapters)]
                for owner, key in owners:
                    # Under the layer's own name, by which AutoTP finds its tp_plan entry and how to cut uneven heads.
                    owner._modules[key] = original(self, owner._modules[key], name)
            return child

        return _replace_with_config

    with swapped(host.AutoTP, "_replace_with_config", make):
        yield
