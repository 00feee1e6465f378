"""The tables and sentences of `ds-etp check --model`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from rich.table import Table

from ds_etp.cli.check_model import ExpertsGroup, Inspection, path_pattern
from ds_etp.experts.layout import ParameterLayout
from ds_etp.parallel.topology import Topology


def report(inspection: Inspection, topology: Topology) -> Iterator[Table | str]:
    """What to print, in order."""
    modules = _table(
        f"{inspection.model_class}: routed experts", "layers", "class", "implementation", "E", "I", "H", "K", "per rank"
    )
    for group in inspection.groups:
        modules.add_row(*_module_row(group, topology, inspection.itemsize))
    yield modules
    weights = _table("Weights of one layer", "layers", "parameter", "whole", "on one rank", "cut over etp")
    for group in inspection.groups:
        pattern = path_pattern(group.paths)
        for name, parameter in group.layout.parameters.items():
            local = parameter.local_shape(topology)
            weights.add_row(pattern, name, _shape(parameter.shape), _shape(local), _cut(parameter, topology))
            pattern = ""
        weights.add_section()
    yield weights
    yield _totals(inspection, topology)
    dense = inspection.dense
    if dense is not None and dense.entries:
        plan_table = _table(f"Dense layers AutoTP is asked to split over tp {topology.tp}", "layers", "style")
        for pattern, style in dense.entries.items():
            plan_table.add_row(pattern, f"{style}: refused" if style in dense.refused else style)
        yield plan_table
    yield from (f"- {note}" for note in inspection.notes)


def _module_row(group: ExpertsGroup, topology: Topology, itemsize: int) -> tuple[str, ...]:
    layout = group.layout
    spare = f" + {layout.spare_experts}" if layout.spare_experts else ""  # of experts without weights
    local = sum(prod(parameter.local_shape(topology)) for parameter in layout.parameters.values())
    count = len(group.paths)
    held = f"{group.local_experts} experts, {layout.intermediate_size // topology.etp} columns"
    return (
        path_pattern(group.paths),
        group.class_name,
        group.implementation,
        f"{layout.num_experts}{spare}",
        str(layout.intermediate_size),
        str(layout.hidden_size),
        group.top_k,
        f"{held}, {_bytes(local * count * itemsize)}",
    )


def _totals(inspection: Inspection, topology: Topology) -> Table:
    whole, local = inspection.expert_parameters, inspection.local_parameters
    table = _table(f"Parameters, in {inspection.dtype}", "of", "number", "bytes")
    size = inspection.itemsize
    table.add_row("dense layers, whole", f"{inspection.other_parameters:,}", _bytes(inspection.other_parameters * size))
    table.add_row("experts, whole", f"{whole:,}", _bytes(whole * size))
    of = "one rank of each pipeline stage, all together" if topology.pp > 1 else "one rank"
    split = f"experts, on {of} (etp {topology.etp} x ep {topology.ep})"
    table.add_row(split, f"{local:,}", _bytes(local * size))
    if inspection.zero_stage == 3 and topology.edp > 1:
        part = -(-local // topology.edp)
        table.add_row(f"... partitioned by ZeRO-3 (edp {topology.edp})", f"{part:,}", _bytes(part * size))
    return table


def _cut(parameter: ParameterLayout, topology: Topology) -> str:
    if parameter.dim is None:
        return "held whole, added by one rank"
    chunks = f" in {parameter.fused_chunks} blocks" if parameter.fused_chunks > 1 else ""
    if topology.etp == 1:
        return "not cut"
    return f"dimension {parameter.dim}{chunks}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _bytes(count: int) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    size = float(count)
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _table(title: str, *names: str) -> Table:
    return Table(*names, title=title, title_justify="left")
