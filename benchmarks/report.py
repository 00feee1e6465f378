"""The results as a page of tables. It says what was measured, and no more."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from benchmarks import compared
from benchmarks.cases import Case, Shape
from benchmarks.environment import TRANSFORMERS
from benchmarks.tables import MB, table


def page(results: dict[str, Any], command: str, device: str) -> str:
    """Everything, as Markdown.

    Args:
        results: any of `times`, `dispatchers`, `overlap`, `messages`, `memory`, `wire`, `layers`, `groups` and
            `routing`; `loads`, and `shapes`.
        command: how it was run.
        device: `cpu`, or the name of the GPUs.
    """
    parts = [
        "# Benchmark results",
        "Written by the command below; nothing in here is edited by hand.",
        _machine(results, command, device),
    ]
    makers = {
        "times": compared.times,
        "dispatchers": compared.dispatchers,
        "overlap": compared.overlap,
        "messages": compared.messages,
        "memory": _memory,
        "wire": _wire,
        "layers": _layers,
        "groups": _groups,
        "routing": _routing,
    }
    parts += [maker(results[name]) for name, maker in makers.items() if results.get(name)]
    return "\n\n".join(parts) + "\n"


def _machine(results: dict[str, Any], command: str, device: str) -> str:
    loads, shapes = results["loads"], results["shapes"]
    rows = [
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d")),
        ("command", f"`{command}`"),
        ("machine", f"{os.cpu_count()} cores, {platform.machine()}, {device}"),
        ("load average", ", ".join(f"{load:.1f}" for load in loads) + " (1 minute; start, then after each part)"),
        ("python", ".".join(map(str, sys.version_info[:3]))),
        *[(name, version(name)) for name in ("torch", "deepspeed", "transformers")],
        ("transformers of AutoEP's environment", TRANSFORMERS),
        ("models", "; ".join(map(_shape, shapes))),
    ]
    busy = loads[0] > (os.cpu_count() or 1) + 1  # later ones count the launches that are built side by side
    note = "\n\nOther work kept this machine busy: the wall-clock times below are not to be relied on." if busy else ""
    return table(("", ""), rows) + note


def _shape(shape: Shape) -> str:
    return (
        f"{shape.layers} layers, hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.name} experts, "
        f"{shape.tokens:,} tokens a step, fp32"
    )


def _memory(rows: list[dict[str, Any]]) -> str:
    parts = ("parameters", "gradients", "optimizer", "activations", "bucket")
    lines = []
    for row in rows:
        case: Case = row["case"]
        if "error" in row:
            lines.append((case.name, row["error"], *[""] * 8))
            continue
        total = sum(row[part] for part in parts)
        lines.append(
            (
                f"{case.name} ({case.environment})",
                f"{row['peak'] / MB:.1f}",
                f"{total / MB:.1f}",
                f"{row['peak'] / total:.2f}",
                *[f"{row[part] / MB:.1f}" for part in parts],
                f"{row['experts']:,}",
            )
        )
    header = ("case", "peak, MB", "sum of parts, MB", "peak / sum", *parts, "expert bytes")
    return (
        "## Peak memory of a rank\n\nOf tensors, at the peak of two whole steps. `activations` is what autograd keeps "
        "of one forward, `bucket` the buffer ZeRO reduces gradients in. Gradients grow while activations go, so the "
        "peak may be below the sum.\n\n" + table(header, lines)
    )


def _wire(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            "({}, {}, {})".format(*row["layout"]),
            row["per_token"],
            row["dispatcher"] + (" (auto)" if row["auto"] else ""),
            f"{row['rows']:.2f}",
            f"{row['formula']:.2f}",
            f"{row['backward_rows'] - row['tp_rows']:.2f}",
            f"{row['tp_rows']:.0f}",
            f"{row['bytes']:,.0f}",
            f"{row['collectives']:.0f}",
            f"{row['megatron_alltoall']:.2f}",
            f"{row['megatron_allgather']:.0f}",
        )
        for row in rows
    ]
    header = (
        "(tp, ep, etp)",
        "K",
        "dispatcher",
        "rows forward",
        "formula",
        "rows backward",
        "rows of the tp gather, each way",
        "bytes at H = 64, both ways",
        "collectives",
        "Megatron-Core alltoall",
        "Megatron-Core allgather",
    )
    return "\n\n".join(
        [
            "## On the wire",
            "Recorded on real processes, per token a rank owns, uniform routing over 64 experts. Megatron-Core's are "
            "the formulas of its dispatchers, forward. The gather over tp that attention needs is counted apart.",
            table(header, lines),
            _against_megatron(rows),
        ]
    )


def _against_megatron(rows: list[dict[str, Any]]) -> str:
    lines = []
    for per_token in dict.fromkeys(row["per_token"] for row in rows):
        auto = [row for row in rows if row["auto"] and row["per_token"] == per_token]
        half = sum(row["rows"] <= row["megatron_alltoall"] / 2 for row in auto)
        above = sum(row["rows"] > min(row["megatron_alltoall"], row["megatron_allgather"]) * 1.001 for row in auto)
        off = max(abs(row["rows"] / row["formula"] - 1) if row["formula"] else 0.0 for row in auto)
        lines.append((per_token, f"{half} of {len(auto)}", f"{above} of {len(auto)}", f"{off:.1%}"))
    header = (
        "K",
        "layouts with at most half of Megatron-Core's alltoall",
        "layouts above its better dispatcher",
        "largest difference from the formula",
    )
    return table(header, lines)


def _layers(rows: list[dict[str, Any]]) -> str:
    header = ("varied", "value", "ranks", "ms, forward + backward of one MoE layer")
    return "## Growth of a layer\n\n" + table(
        header, [(r["varied"], r["value"], r["world"], f"{r['seconds'] * 1e3:.1f}") for r in rows]
    )


def _groups(rows: list[dict[str, Any]]) -> str:
    header = ("ranks", "layout, ms", "dispatcher, ms", "groups, ms", "calls that make groups")
    return (
        "## Growth of groups\n\nOn torch's fake process group: the work of one rank, without messages. etp 2, ep 4.\n\n"
        + table(
            header,
            [
                (r["world"], *(f"{r[part] * 1e3:.2f}" for part in ("layout", "dispatcher", "groups")), r["calls"])
                for r in rows
            ],
        )
    )


def _routing(rows: list[dict[str, Any]]) -> str:
    orders = [name for name in rows[0] if name != "ep"]
    lines = [(row["ep"], *(f"{row[name] * 1e3:.2f}" for name in orders)) for row in rows]
    return (
        "## Growth of routing on the host\n\n"
        "Bookkeeping of one MoE layer's call under the all-to-all dispatchers, etp 2: reading the counts of all ranks, "
        "splits, and launches of what makes the index tables. Processor time of the "
        "quickest run, without messages.\n\n" + table(("ep", *(f"{name}, ms" for name in orders)), lines)
    )
