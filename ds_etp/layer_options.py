"""What the config block asks of each experts module, beside its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ds_etp.config import ExpertTensorParallelConfig
from ds_etp.experts import Shard, marks, sharded_modules
from ds_etp.groups import ExpertGroups
from ds_etp.layouts import ExpertsLayout
from ds_etp.patches.experts_interface import GROUPED_MM_ALIGNMENT, allow_marks, is_aligned, takes_marks
from ds_etp.plans import PLANS
from ds_etp.topology import Topology


def make_shard(
    path: str,
    module: nn.Module,
    layout: ExpertsLayout,
    groups: ExpertGroups,
    plan_name: str,
    block: ExpertTensorParallelConfig,
) -> Shard:
    """What one experts module is to know of itself, this rank's part and its plan included."""
    plan_class = PLANS[plan_name]
    reduce_dtype = torch.float32 if block.reduce_dtype == "fp32" else None
    static = block.static_shapes and plan_class.knows_shapes and allow_marks(module, groups.topology, layout)
    return Shard(
        path,
        layout,
        groups.topology,
        groups.ep.index,
        groups.expt_tp.index,
        plan_class(groups, layout.num_experts, reduce_dtype, equal_batches=block.equal_batches),
        takes_marks=takes_marks if static else None,
        recompute=block.recompute,
    )


def unaligned_shards(
    model: nn.Module, layouts: Mapping[str, ExpertsLayout], topology: Topology, itemsize: int | None
) -> tuple[list[str], str]:
    """Experts modules whose shards their experts implementation can't multiply, and a sentence about them.

    Args:
        model: not split yet.
        layouts: of each experts module, by path.
        topology: what the config comes to.
        itemsize: bytes of one weight while training; None: those that each module has now.

    Returns:
        Their paths, and what happens to them; nothing and "" where all fit.
    """
    sizes = {path: itemsize or next(model.get_submodule(path).parameters()).element_size() for path in layouts}
    paths = [
        path
        for path, layout in layouts.items()
        if not is_aligned(model.get_submodule(path), layout, topology, sizes[path])
    ]
    if not paths:
        return [], ""
    whole = layouts[paths[0]].intermediate_size
    columns, row = whole // topology.etp, whole // topology.etp * sizes[paths[0]]
    return paths, (
        f"{paths[0]} ({len(paths)} in all): etp {topology.etp} leaves {columns} of {whole} columns, {row} bytes a row, "
        f"and experts_implementation='grouped_mm' needs a multiple of {GROUPED_MM_ALIGNMENT}. These run 'eager', which "
        "gives the same numbers."
    )


def without_effect(model: nn.Module, block: ExpertTensorParallelConfig) -> Iterator[str]:
    """Options that do nothing for a sharded model, or for some of its experts, a sentence each."""
    waiting = [path for path, module in sharded_modules(model) if block.static_shapes and not marks(module)]
    if waiting:
        yield (
            f"static_shapes has no effect on {waiting[0]} ({len(waiting)} in all): it is for ep above 1, more than one "
            "expert a rank, plans replicated and allgather, transformers 5.18 or newer, and experts_implementation "
            "grouped_mm or batched_mm"
        )
