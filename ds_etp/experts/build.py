"""Builds the shard of each experts module as the config block asks: dispatcher, recompute, overlap.

Before that, it tells which groups dispatchers send over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.config.grouped_mm import GROUPED_MM_ALIGNMENT
from ds_etp.dispatch.cost import DispatchChoice
from ds_etp.dispatch.registry import DISPATCHERS
from ds_etp.experts.blocks import find_shared_experts, top_k_of
from ds_etp.experts.layout import ExpertsLayout
from ds_etp.experts.sharded import Shard, sharded_modules
from ds_etp.experts.shared_overlap import SharedExpertOverlap, install_overlap
from ds_etp.monitor.router_load import RouterLoad
from ds_etp.parallel.process_groups import PRIVATE_KINDS, ExpertGroups
from ds_etp.parallel.topology import GroupKind, Topology
from ds_etp.patches.peft.expert_lora import plain_path
from ds_etp.patches.transformers.experts_flags import experts_implementation
from ds_etp.patches.transformers.experts_interface import is_aligned
from ds_etp.patches.transformers.grouped_mm import host_fault, sorted_forward
from ds_etp.patches.versions import TRANSFORMERS_GROUPED_LINEAR, TRANSFORMERS_MAX


def make_shard(
    path: str,
    module: nn.Module,
    layout: ExpertsLayout,
    groups: ExpertGroups,
    plan_name: str,
    block: ExpertTensorParallelConfig,
    shared_overlap: SharedExpertOverlap | None = None,
    model: nn.Module | None = None,
) -> Shard:
    """What one experts module is to know of itself, this rank's part and its dispatcher included. `model` tells K."""
    plan_class = DISPATCHERS[plan_name]
    reduce_dtype = torch.float32 if block.reduce_dtype == "fp32" else None
    return Shard(
        path,
        layout,
        groups.topology,
        groups.ep.index,
        groups.expt_tp.index,
        plan_class(groups, layout.num_experts, reduce_dtype),
        recompute=block.recompute,
        shared_overlap=shared_overlap,
        sorted_forward=sorted_forward if layout.adapter is None else None,
        experts_per_token=None if model is None else top_k_of(model.get_submodule(plain_path(path).rpartition(".")[0])),
        router_load=RouterLoad(layout.num_experts) if block.monitor_router else None,
    )


def private_groups(choices: Iterable[DispatchChoice], device: torch.device) -> list[GroupKind]:
    """The private groups to make: those that a dispatcher of any rank sends over. Collective over the world.

    Pipeline stages may differ in their dispatchers, and one may have none.
    """
    used = {kind for choice in choices for kind in DISPATCHERS[choice.dispatcher].private_groups}
    anywhere = torch.tensor([kind in used for kind in PRIVATE_KINDS], dtype=torch.uint8, device=device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return [kind for kind, is_used in zip(PRIVATE_KINDS, anywhere.tolist(), strict=True) if is_used]


def enable_shared_expert_overlap(
    model: nn.Module, paths: Iterable[str], warn: Callable[[str], None]
) -> dict[str, SharedExpertOverlap]:
    """Installs shared-expert overlap where a decoder block's source says that it may be so.

    Args:
        model: not split yet.
        paths: of the experts modules.
        warn: told, once a model, if a block turns out to call its shared experts in another way.

    Returns:
        Shared experts by the path of the routed ones.
    """
    wasted: list[str] = []

    def waste(where: str) -> None:
        if not wasted:
            wasted.append(where)
            warn(f"overlap runs {where} once too often: their block doesn't use what was made early. Leave it out")

    found = {}
    for path in paths:
        where, _, name = plain_path(path).rpartition(".")
        block = model.get_submodule(where)
        shared = find_shared_experts(block, name)
        if shared:
            found[path] = SharedExpertOverlap(block.get_submodule(shared), partial(waste, f"{where}.{shared}"))
            install_overlap(block, found[path])
    return found


def misaligned_shards(
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


def ineffective_options(model: nn.Module, block: ExpertTensorParallelConfig) -> Iterator[str]:
    """Options that do nothing for a sharded model, or for some of its experts, a sentence each."""
    alone = [
        path for path, module in sharded_modules(model) if block.overlap and module.ds_etp_shard.shared_overlap is None
    ]
    if alone:
        yield (
            f"overlap has no effect on {alone[0]} ({len(alone)} in all): its block calls no shared experts after it, "
            "with its own input"
        )


def experts_forwards(model: nn.Module) -> tuple[list[tuple[str, str]], str]:
    """What computes a sharded model's experts now, as rows (name, value) of the layout's table, and what it lacks.

    A stage without experts has no row. The sentence is empty where nothing is lacking.
    """
    modules = [module for _, module in sharded_modules(model)]
    counts = Counter(_experts_forward(module) for module in modules)
    value = ", ".join(name if len(counts) == 1 else f"{name} ({count})" for name, count in counts.items())
    rows = [("experts run", value)] if modules else []
    if not any(_gets_sorted_rows(module) and experts_implementation(module) == "grouped_mm" for module in modules):
        return rows, ""
    fault = host_fault()
    return rows, fault and (
        f"transformers {version('transformers')} {fault}: experts run its own grouped_mm forward, which sorts rows "
        "once more. The same numbers, in more time and memory. ds_etp's forward for sorted rows knows transformers "
        f"{TRANSFORMERS_GROUPED_LINEAR} to {TRANSFORMERS_MAX}."
    )


def _gets_sorted_rows(module: Any) -> bool:
    """Whether dispatchers bring rows expert by expert to a sharded module that is called in the usual way."""
    shard: Shard = module.ds_etp_shard
    return shard.sorted_forward is not None


def _experts_forward(module: Any) -> str:
    name = experts_implementation(module) or "the family's own"
    if name != "grouped_mm" or not _gets_sorted_rows(module):
        return name
    return f"{name}, rows are sorted" if sorted_forward(module) is not None else f"{name}, sorts rows again"
