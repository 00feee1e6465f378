"""The chart of `ds-etp plan`: stacked bars of a rank's memory and of a token's time, layout by layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_etp.errors import ConfigError
from ds_etp.planner.hardware import Hardware
from ds_etp.planner.model import ModelFacts
from ds_etp.planner.ranking import Proposal

_TIMES = {"dense": "attention, dense", "experts": "experts", "dispatch": "tokens to experts", "attention": "AutoTP"}
_TIMES |= {"context": "Ulysses", "pipe": "pipeline messages", "bubble": "pipeline bubble", "data": "data parallel"}


def draw(path: Path, facts: ModelFacts, hardware: Hardware, proposals: Sequence[Proposal]) -> None:
    """Draws layouts as stacked bars, best at the top, into a file of any kind matplotlib writes.

    Raises:
        ConfigError: matplotlib isn't installed, or doesn't know the kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--chart needs matplotlib: pip install matplotlib.") from None

    labels = [f"{place}: {proposal.sizes}" for place, proposal in enumerate(proposals, 1)]
    figure = Figure(figsize=(13, 1.8 + 0.42 * len(proposals)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    peaks = [_peak_lines(proposal) for proposal in proposals]
    names = list(dict.fromkeys(name for lines in peaks for name in lines))
    _bars(memory, labels, {name: [lines.get(name, 0.0) / 1e9 for lines in peaks] for name in names})
    memory.axvline(hardware.memory * hardware.usable / 1e9, color="black", linestyle="--", linewidth=1)
    memory.set_xlabel("GB a rank at its peak; dashed: what a job can fill")
    _bars(
        time,
        labels,
        {
            words: [
                getattr(proposal.timing, part) / proposal.timing.tokens * hardware.gpus * 1e6 for proposal in proposals
            ]
            for part, words in _TIMES.items()
            if any(getattr(proposal.timing, part) for proposal in proposals)
        },
    )
    time.set_xlabel("GPU microseconds a token, estimated")
    memory.invert_yaxis()
    figure.suptitle(f"{facts.name} on {hardware.gpus} GPUs")
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise ConfigError(f"--chart {path}: {error}.") from None


def _peak_lines(proposal: Proposal) -> dict[str, float]:
    memory = proposal.memory
    phase = "backward" if memory.of("backward") >= memory.of("step") else "step"
    return {line.name: line.bytes for line in memory.lines if line.phase in ("always", phase)}


def _bars(axes: Any, labels: Sequence[str], parts: dict[str, list[float]]) -> None:
    from matplotlib import colormaps

    left = [0.0] * len(labels)
    for place, (name, values) in enumerate(parts.items()):
        axes.barh(labels, values, left=left, label=name, color=colormaps["tab20"](place))
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=7, frameon=False)
