"""transformers' experts interface (5.0 to 5.24): implementation, K, and models it has split itself."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import nn

from ds_etp.config.grouped_mm import keeps_alignment
from ds_etp.errors import config_error
from ds_etp.experts.layout import ExpertsLayout
from ds_etp.parallel.topology import Topology
from ds_etp.patches.transformers.experts_flags import experts_implementation


def is_aligned(module: nn.Module, layout: ExpertsLayout, topology: Topology, itemsize: int) -> bool:
    """Whether a module's experts implementation can multiply its shards, if it can the whole experts.

    Args:
        module: the experts module, split or not.
        layout: of the whole module.
        topology: what it is split by.
        itemsize: bytes of one weight while training.
    """
    implementation = experts_implementation(module)
    return implementation != "grouped_mm" or keeps_alignment(layout.intermediate_size, topology.etp, itemsize)


def run_eagerly(module: Any) -> None:
    """Gives one module the family's own forward, whatever the model's choice is and will be."""
    config = copy(module.config)
    config._experts_implementation_internal = "eager"  # the property would set it in parts that the copy shares
    module.config = config


# What families' configs call K.
PER_TOKEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
_USUAL_PER_TOKEN = 8


def experts_per_token(module: nn.Module, num_experts: int) -> int:
    """K, as a module's config has it, or the field's usual one: only the choice of a dispatcher depends on it."""
    config = getattr(module, "config", None)
    for name in PER_TOKEN_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return min(value, num_experts)
    return min(_USUAL_PER_TOKEN, num_experts)


def refuse_split_model(model: nn.Module) -> None:
    """Refuses a model that transformers' own tensor or expert parallelism has split already.

    Raises:
        ConfigError: names the argument to leave out.
    """
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is not None:
        raise config_error(
            "tp_plan",
            getattr(model, "_tp_plan", None) and "auto",
            f"in from_pretrained has split {type(model).__name__} already",
            works="no tp_plan: set tensor_parallel.autotp_size and expert_tensor_parallel in the DeepSpeed config",
        )
