"""What an engine checks of a model before anything is changed, and `ds-etp check --model` without an engine."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ds_etp import config as block_config
from ds_etp.errors import config_error
from ds_etp.families import find_experts, read_layout
from ds_etp.layouts import ExpertsLayout
from ds_etp.patches.experts_interface import check_alignment, refuse_split_model
from ds_etp.patches.peft import check_adapters
from ds_etp.patches.peft_autotp import check_split_layers
from ds_etp.topology import Topology


def checked_layouts(
    model: nn.Module, topology: Topology, ds_config: Mapping[str, object], itemsize: int | None
) -> dict[str, ExpertsLayout]:
    """The layout of each experts module, once all of them are known to fit.

    Args:
        model: not split yet; its parameters may be partitioned by ZeRO-3, or on the meta device.
        topology: what the config comes to.
        ds_config: the raw DeepSpeed config.
        itemsize: bytes of one weight while training; None: those that each module has now.

    Returns:
        Layouts by the path of the module, in the model's order; at least one.

    Raises:
        ConfigError: names the first layer or setting that doesn't work.
    """
    refuse_split_model(model)
    modules = find_experts(model)
    if not modules:
        raise config_error(
            "expert_tensor_parallel.enabled",
            True,
            f"found no routed experts in {type(model).__name__}",
            works="false, or a mixture-of-experts model of transformers",
        )
    layouts = {path: read_layout(path, module) for path, module in modules.items()}
    check_adapters(model, layouts)
    check_split_layers(model, topology.tp, ds_config)
    for path, layout in layouts.items():
        block_config.check_layer(
            topology,
            path,
            num_experts=layout.num_experts,
            intermediate_size=layout.intermediate_size,
            spare_experts=layout.spare_experts,
        )
        size = itemsize or next(modules[path].parameters()).element_size()
        check_alignment(path, modules[path], layout, topology, size)
    return layouts
