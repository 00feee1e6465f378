"""The results as a page of tables. It says what was measured, and no more."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from statistics import median
from typing import Any

from benchmarks.cases import SHAPES, Case, Shape, targets
from benchmarks.environment import TRANSFORMERS
from benchmarks.runs import Key, Samples, ratio

_MB = 1e6


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of text."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def page(results: dict[str, Any], command: str, device: str) -> str:
    """Everything, as Markdown.

    Args:
        results: any of `wire`, `times`, `plans`, `overlap`, `memory`, `layers`, `groups`, and `loads`, `shapes`.
        command: how it was run.
        device: `cpu`, or the name of the GPUs.
    """
    parts = [
        "# Benchmark results",
        "Written by the command below; nothing in here is edited by hand.",
        _machine(results, command, device),
    ]
    makers = {
        "times": _times,
        "plans": _plans,
        "overlap": _overlap,
        "memory": _memory,
        "wire": _wire,
        "layers": _layers,
        "groups": _groups,
    }
    parts += [maker(results[name]) for name, maker in makers.items() if results.get(name)]
    return "\n\n".join(parts) + "\n"


def _machine(results: dict[str, Any], command: str, device: str) -> str:
    loads, shapes = results["loads"], results["shapes"]
    rows = [
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d")),
        ("command", f"`{command}`"),
        ("machine", f"{os.cpu_count()} cores, {platform.machine()}, {device}"),
        ("load average", ", ".join(f"{load:.1f}" for load in loads) + " (1 minute; start, between parts, end)"),
        ("python", ".".join(map(str, sys.version_info[:3]))),
        *[(name, version(name)) for name in ("torch", "deepspeed", "transformers")],
        ("transformers of AutoEP's environment", TRANSFORMERS),
        ("models", "; ".join(map(_shape, shapes))),
    ]
    busy = max(loads) > (os.cpu_count() or 1) + 1
    note = "\n\nOther work kept this machine busy: the wall-clock times below are not to be relied on." if busy else ""
    return table(("", ""), rows) + note


def _shape(shape: Shape) -> str:
    return (
        f"{shape.layers} layers, hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.name} experts, "
        f"{shape.tokens:,} tokens a step, fp32"
    )


def _times(samples: dict[Key, Samples]) -> str:
    rows, tokens = [], {shape.name: shape.tokens for shape in SHAPES}
    for (shape, case), row in samples.items():
        if row.error or not row.step:
            rows.append((shape, case.environment, case.name, row.error or "not run", *[""] * 7))
            continue
        passes, whole = median(row.forward_backward), median(row.step)
        peak = f"{row.cuda_peak / _MB:.1f}" if row.cuda_peak else ""
        rows.append(
            (
                shape,
                case.environment,
                case.name + (f" ({row.plan})" if row.plan else ""),
                f"{passes * 1e3:.0f}",
                f"{median(row.processor) * 1e3:.0f}",
                f"{whole * 1e3:.0f}",
                f"{max(whole - passes, 0) / whole:.0%}",
                f"{tokens.get(shape, 0) / whole:,.0f}" if shape in tokens else "",
                f"{row.messages:.0f}",
                f"{row.bytes / _MB:.2f}",
                peak,
            )
        )
    header = (
        "model",
        "environment",
        "case",
        "forward + backward, ms",
        "CPU time of it, all ranks, ms",
        "whole step, ms",
        "share of reduction and optimizer",
        "tokens/s",
        "messages a MoE layer",
        "MB sent a MoE layer",
        "peak on the GPU, MB",
    )
    rounds = max((len(row.step) for row in samples.values()), default=0)
    return "\n\n".join(
        [
            "## Time of a step",
            f"Interleaved launches, {rounds} of each case; the slowest rank of each step counts, then the median over "
            "steps, then over launches. Forward + backward is without the reduction of gradients. Messages and bytes "
            "are recorded, of one MoE block, forward and backward, sent by one rank (mean). CPU time hardly depends on "
            "what else the machine does; the others do, see the load average.",
            table(header, rows),
            "Ratios within a round, median over rounds, beside what the project aims at:",
            _ratios(samples),
        ]
    )


def _ratios(samples: dict[Key, Samples]) -> str:
    def find(shape: str, environment: str, name: str) -> Samples:
        return next(
            (
                row
                for (of, case), row in samples.items()
                if (of, case.environment, case.name) == (shape, environment, name)
            ),
            Samples(),
        )

    rows = []
    for shape in dict.fromkeys(shape for shape, _ in samples):
        for target in targets():
            own = find(shape, target.environment, target.case)
            peer = find(shape, target.environment, target.peer)
            passes, whole, processor = (ratio(own, peer, of) for of in ("forward_backward", "step", "processor"))
            if passes is None or whole is None or processor is None:
                continue
            aim = target.most.get(shape)
            met = "" if aim is None else f"at most {aim}: {'met' if passes <= aim else 'missed'}"
            rows.append((shape, target.case, target.peer, f"{passes:.2f}", f"{processor:.2f}", f"{whole:.2f}", met))
    return table(("model", "case", "beside", "forward + backward", "its CPU time", "whole step", "aim"), rows)


def _plans(samples: dict[Key, Samples]) -> str:
    rows = []
    layouts = dict.fromkeys((shape, case.name.split(":")[0]) for shape, case in samples)
    for shape, layout in layouts:
        own = {
            case.plan: row
            for (of, case), row in samples.items()
            if of == shape and case.name.startswith(f"{layout}:") and row.step
        }
        if "auto" not in own:
            continue
        best = min((plan for plan in own if plan != "auto"), key=lambda plan: median(own[plan].forward_backward))
        times = ", ".join(f"{plan} {median(row.forward_backward) * 1e3:.0f}" for plan, row in own.items())
        rows.append((shape, layout, own["auto"].plan, best, f"{ratio(own['auto'], own[best]):.2f}", times))
    header = ("model", "layout", "auto took", "fastest", "auto / fastest (aim: at most 1.05)", "ms, forward + backward")
    return "## Plans\n\n" + table(header, rows)


def _overlap(samples: dict[Key, Samples]) -> str:
    rows = []
    for (shape, case), on in samples.items():
        if not case.overlap:
            continue
        off = samples[shape, replace(case, name=case.name.replace("with", "without"), overlap=False)]
        if on.error or off.error:
            rows.append((shape, case.name.split(":")[0], on.error or off.error, *[""] * 4))
            continue
        ratios = [ratio(on, off, of) or 0.0 for of in ("forward_backward", "processor", "step")]
        same = "yes" if (on.messages, on.bytes) == (off.messages, off.bytes) else "no"
        rows.append((shape, case.name.split(":")[0], on.plan, *[f"{value:.2f}" for value in ratios], same))
    header = ("model", "layout", "plan", "forward + backward", "its CPU time", "whole step", "same messages")
    return (
        "## Overlap\n\nGLM-4-MoE, whose blocks have a shared expert: time with `overlap` / without, within a round, "
        "median over rounds; and whether as many messages and bytes are sent.\n\n" + table(header, rows)
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
                f"{row['peak'] / _MB:.1f}",
                f"{total / _MB:.1f}",
                f"{row['peak'] / total:.2f}",
                *[f"{row[part] / _MB:.1f}" for part in parts],
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
            row["plan"] + (" (auto)" if row["auto"] else ""),
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
        "plan",
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
    header = ("ranks", "layout, ms", "plan, ms", "groups, ms")
    return (
        "## Growth of groups\n\nOn torch's fake process group: the work of one rank, without messages. etp 2, ep 4.\n\n"
        + table(
            header, [(r["world"], *(f"{r[part] * 1e3:.2f}" for part in ("layout", "plan", "groups"))) for r in rows]
        )
    )
