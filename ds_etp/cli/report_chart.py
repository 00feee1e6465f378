"""The picture of `ds-etp report`: heat maps of layers x experts at some steps, and of layers over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_etp.errors import ConfigError
from ds_etp.monitor.metrics import ENTROPY, MAX_OVER_MEAN
from ds_etp.monitor.read import Report

_PANELS = 6  # reports whose layers x experts are drawn, evenly spread from the first to the last
_LOADS = (1 / 8, 8)  # load over mean, at the ends of the colours


def draw(path: Path, report: Report) -> None:
    """Draws into a file of any kind matplotlib writes.

    Raises:
        ConfigError: matplotlib isn't installed, or doesn't know the kind of file.
    """
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("ds-etp report draws with matplotlib: pip install matplotlib.") from None

    layers = report.layers
    height = 1.6 + min(max(0.16 * len(layers), 1.2), 9)
    figure: Any = Figure(figsize=(14, height * (2 if report.tokens else 1)), layout="constrained")
    over_time = figure
    if report.tokens:
        by_expert, over_time = figure.subfigures(2, 1)
        shown = panels(len(report.steps))
        axes = by_expert.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        image = None
        for place, report_index in zip(axes, shown, strict=True):
            grid = loads_of(report, layers, report_index)
            image = place.imshow(
                grid, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=LogNorm(*_LOADS, clip=True)
            )
            place.set_title(f"step {report.steps[report_index]}", fontsize=9)
            place.set_xlabel("expert", fontsize=8)
        _name_layers(axes[0], layers)
        bar = by_expert.colorbar(image, ax=axes, ticks=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], label="load / mean load")
        bar.ax.set_yticklabels(["1/8 or less", "1/4", "1/2", "1", "2", "4", "8 or more"])
        bar.ax.minorticks_off()
    axes = over_time.subplots(1, 2, sharey=True)
    for place, name, words, ends in (
        (axes[0], MAX_OVER_MEAN, "most loaded expert / mean", (1, None)),
        (axes[1], ENTROPY, "entropy of the load (1: even)", (None, 1)),
    ):
        grid = [[float("nan") if value is None else value for value in report.metrics[layer][name]] for layer in layers]
        image = place.imshow(
            grid,
            aspect="auto",
            interpolation="nearest",
            cmap="viridis" if name == ENTROPY else "viridis_r",
            vmin=ends[0],
            vmax=ends[1],
        )
        place.set_title(words, fontsize=9)
        place.set_xlabel("step", fontsize=8)
        ticks = panels(len(report.steps))
        place.set_xticks(ticks, [str(report.steps[tick]) for tick in ticks], fontsize=7)
        over_time.colorbar(image, ax=place)
    _name_layers(axes[0], layers)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise ConfigError(f"--out {path}: {error}.") from None


def panels(reports: int) -> list[int]:
    """Which of so many reports are drawn one by one."""
    count = min(reports, _PANELS)
    return [round(place * (reports - 1) / max(count - 1, 1)) for place in range(count)]


def loads_of(report: Report, layers: Sequence[str], report_index: int) -> list[list[float]]:
    """Each expert's tokens over the mean of its layer's, layer by layer; not a number where there are none."""
    wide = max(len(report.tokens[layer]) for layer in layers if layer in report.tokens)
    grid = []
    for layer in layers:
        counts = [values[report_index] or 0.0 for values in report.tokens.get(layer, [])]
        mean = sum(counts) / len(counts) if counts else 0.0
        # An expert without tokens is drawn as the least loaded: a logarithm has no place for 0.
        loads = [max(count / mean, _LOADS[0] / 2) if mean else float("nan") for count in counts]
        grid.append(loads + [float("nan")] * (wide - len(loads)))
    return grid


def _name_layers(axes: Any, layers: Sequence[str]) -> None:
    step = -(-len(layers) // 32)  # so many names can be read
    axes.set_yticks(range(0, len(layers), step), layers[::step], fontsize=6)
