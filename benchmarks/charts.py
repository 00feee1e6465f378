"""The results as PNG charts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.runs import Key, Samples, typical


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """A file for each part there are results of."""
    import matplotlib

    matplotlib.use("Agg")
    makers = {"times": _times, "wire": _wire, "layers": _layers, "groups": _groups}
    paths = []
    for name, maker in makers.items():
        if results.get(name):
            figure = maker(results[name])
            paths.append(folder / f"{name}.png")
            figure.tight_layout()
            figure.savefig(paths[-1], dpi=120)
    return paths


def _figure(columns: int, height: float = 4.0) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * columns, height))
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _times(samples: dict[Key, Samples]) -> Any:
    shapes = list(dict.fromkeys(shape for shape, _ in samples))
    figure, axes = _figure(len(shapes), 5.0)
    for axis, shape in zip(axes, shapes, strict=True):
        rows = [(case, row) for (of, case), row in samples.items() if of == shape and row.step]
        names = [case.name + (" *" if case.environment == "autoep" else "") for case, _ in rows]
        passes = [typical(row.forward_backward) * 1e3 for _, row in rows]
        rest = [max(typical(row.step) * 1e3 - done, 0) for (_, row), done in zip(rows, passes, strict=True)]
        axis.barh(names, passes, label="forward + backward")
        axis.barh(names, rest, left=passes, label="reduction, optimizer")
        axis.invert_yaxis()
        axis.set(title=shape, xlabel="ms a step (* in AutoEP's environment)")
        axis.legend()
    return figure


def _wire(rows: list[dict[str, Any]]) -> Any:
    counts = list(dict.fromkeys(row["per_token"] for row in rows))
    figure, axes = _figure(len(counts), 5.0)
    for axis, count in zip(axes, counts, strict=True):
        auto = [row for row in rows if row["auto"] and row["per_token"] == count]
        places = range(len(auto))
        axis.bar([p - 0.2 for p in places], [row["rows"] for row in auto], 0.4, label="ds_etp, recorded")
        axis.bar([p + 0.2 for p in places], [row["megatron_alltoall"] for row in auto], 0.4, label="Megatron alltoall")
        axis.scatter(places, [row["megatron_allgather"] for row in auto], color="black", label="Megatron allgather")
        axis.set_xticks(list(places), ["{},{},{}".format(*row["layout"]) for row in auto], rotation=60)
        axis.set(title=f"K = {count}", xlabel="tp, ep, etp", ylabel="rows sent a token, forward")
        axis.legend()
    return figure


def _layers(rows: list[dict[str, Any]]) -> Any:
    varied = list(dict.fromkeys(row["varied"] for row in rows))
    figure, axes = _figure(len(varied), 3.5)
    figure.set_figwidth(3.2 * len(varied))
    for axis, name in zip(axes, varied, strict=True):
        points = [row for row in rows if row["varied"] == name]
        axis.plot([row["value"] for row in points], [row["seconds"] * 1e3 for row in points], marker="o")
        axis.set(xlabel=name, ylabel="ms", ylim=(0, None))
    return figure


def _groups(rows: list[dict[str, Any]]) -> Any:
    figure, (axis,) = _figure(1)
    for part in ("layout", "dispatcher", "groups"):
        axis.loglog([row["world"] for row in rows], [row[part] * 1e3 for row in rows], marker="o", label=part)
    axis.set(xlabel="ranks", ylabel="ms")
    axis.legend()
    return figure
