"""Checks of a model before anything is changed, and the choice of its dispatchers.

`ds-etp check --model` does the same without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from ds_etp.config import block as block_config
from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.dispatch.cost import DispatchChoice, choose_dispatcher
from ds_etp.errors import config_error
from ds_etp.experts.graph_break import refuse_wrapped
from ds_etp.experts.layout import ExpertsLayout
from ds_etp.experts.registry import find_experts, read_layout
from ds_etp.parallel.topology import Topology
from ds_etp.patches.deepspeed.ulysses import check_sequences
from ds_etp.patches.peft.autotp_lora import check_split_layers
from ds_etp.patches.peft.checks import check_adapters
from ds_etp.patches.transformers.experts_interface import experts_per_token, refuse_split_model


def checked_layouts(
    model: nn.Module,
    topology: Topology,
    ds_config: Mapping[str, object],
    *,
    is_stage: bool = False,
) -> dict[str, ExpertsLayout]:
    """The layout of each experts module, once all of them are known to fit.

    Args:
        model: not split yet; its parameters may be partitioned by ZeRO-3, or on the meta device.
        topology: what the config comes to.
        ds_config: the raw DeepSpeed config.
        is_stage: the model is one stage of a pipeline, of which others may hold the experts.

    Returns:
        Layouts by the path of the module, in the model's order; at least one, but for a stage.

    Raises:
        ConfigError: names the first layer or setting that doesn't work.
    """
    refuse_split_model(model)
    refuse_wrapped(model)
    modules = find_experts(model)
    if not modules and not is_stage:
        raise config_error(
            "expert_tensor_parallel.enabled",
            True,
            f"found no routed experts in {type(model).__name__}",
            works="false, or a mixture-of-experts model of transformers",
        )
    check_sequences(model, topology)
    layouts = {path: read_layout(path, module) for path, module in modules.items()}
    check_adapters(model, layouts)
    check_split_layers(model, topology.tp, ds_config)
    for path, layout in layouts.items():
        check_divisible(topology, path, layout)
    return layouts


def check_divisible(topology: Topology, path: str, layout: ExpertsLayout) -> None:
    """Refuses sizes that don't divide one experts module; see `config.check_layer`."""
    block_config.check_layer(
        topology,
        path,
        num_experts=layout.num_experts,
        intermediate_size=layout.intermediate_size,
        spare_experts=layout.spare_experts,
    )


def choose_dispatchers(
    model: nn.Module,
    layouts: Mapping[str, ExpertsLayout],
    topology: Topology,
    block: ExpertTensorParallelConfig,
    ranks_per_node: int | None,
) -> dict[str, DispatchChoice]:
    """How tokens reach each experts module, by its path.

    Args:
        model: not split yet.
        layouts: from `checked_layouts`.
        topology: what the config comes to.
        block: the config block.
        ranks_per_node: None where the job is one node.
    """
    return {
        path: choose_dispatcher(
            topology,
            block.dispatcher,
            per_token=experts_per_token(model.get_submodule(path), layout.num_experts),
            experts=layout.num_experts,
            ranks_per_node=ranks_per_node,
            inter_node_cost=block.inter_node_cost,
        )
        for path, layout in layouts.items()
    }


def dispatcher_rows(choices: Iterable[DispatchChoice], block: ExpertTensorParallelConfig) -> list[tuple[str, str]]:
    """Rows (name, value) of the dispatchers that were chosen, for the table of the layout."""
    by_name = {choice.dispatcher: choice for choice in choices}
    names = (f"{name} (auto)" if block.dispatcher == "auto" else name for name in by_name)
    sent = (f"{choice.comm_volume.total:.2f} a token" for choice in by_name.values())
    return [("dispatcher", ", ".join(names)), ("rows sent", ", ".join(sent))]
