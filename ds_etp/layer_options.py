"""What the config block asks of each experts module, beside its sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ds_etp.config import ExpertTensorParallelConfig
from ds_etp.experts import Shard, marks, sharded_modules
from ds_etp.groups import ExpertGroups
from ds_etp.layouts import ExpertsLayout
from ds_etp.patches.experts_interface import allow_marks, takes_marks
from ds_etp.plans import PLANS


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
