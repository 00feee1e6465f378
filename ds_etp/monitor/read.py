"""Router numbers of a run, read back from what DeepSpeed's CSV or TensorBoard monitor wrote. No torch."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ds_etp.errors import ConfigError
from ds_etp.monitor.metrics import LAYER_METRICS, STEP, TOKENS

_CSV, _TENSORBOARD = "router_global_step.csv", "events.out.tfevents.*"
# In the names of CSV files DeepSpeed has "_" for "/".
_METRIC = re.compile(rf"router[/_]({'|'.join(LAYER_METRICS)})[/_](.+)")
_EXPERT = re.compile(rf"{TOKENS}[/_](.+)[/_](\d+)")


@dataclass
class Report:
    """What a run said of its routers, report by report.

    Attributes:
        steps: the step of each report, ascending.
        metrics: by layer and name, one value a report; None where there was none.
        tokens: by layer and expert, one count a report; empty for a run that told none.
    """

    steps: list[int] = field(default_factory=list)
    metrics: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    tokens: dict[str, list[list[float | None]]] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        """Paths, as the model has them from the first to the last."""
        return sorted(self.metrics, key=_by_number)


def read_report(run: Path) -> Report:
    """The numbers under a folder.

    Args:
        run: what the monitor wrote to, or a folder above it that holds one run.

    Raises:
        ConfigError: there is no run, or more than one; or its files need a package that isn't installed.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder. Name the one that DeepSpeed's monitor writes to (output_path).")
    found = {path.parent: _of_csv(path.parent) for path in run.rglob(_CSV)}
    if not found:
        folders = {path.parent for path in run.rglob(_TENSORBOARD)}
        # Others write such files too, Trainer among them.
        found = {folder: series for folder in folders if STEP in (series := _of_tensorboard(folder))}
    if len(found) > 1:
        raise ConfigError(f"{run} holds {len(found)} runs. Name one: {', '.join(map(str, sorted(found)[:10]))}.")
    if not found:
        raise ConfigError(
            f"{run} holds no numbers of routers, neither CSV nor TensorBoard files. A run writes them with "
            '"monitor_router": true in its expert_tensor_parallel block, and DeepSpeed\'s "csv_monitor" or '
            '"tensorboard" enabled.'
        )
    return _arranged(next(iter(found.values())))


Series = dict[str, dict[int, float]]  # by name and samples; where a run was resumed from before, the later value


def _of_csv(folder: Path) -> Series:
    series = {}
    for path in folder.glob("router*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            # A resumed run writes its header once more.
            rows = [row for row in csv.reader(file) if len(row) == 2 and row[0].isdecimal()]
        series[path.stem] = {int(samples): float(value) for samples, value in rows}
    return series


def _of_tensorboard(folder: Path) -> Series:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        raise ConfigError(f"{folder} holds TensorBoard files. To read them: pip install tensorboard.") from None

    series: Series = defaultdict(dict)
    # Later files, of a resumed run, have later names.
    for path in sorted(folder.glob(_TENSORBOARD)):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag.startswith(("router/", f"{TOKENS}/")) and value.tensor.float_val:
                    series[value.tag][event.step] = value.tensor.float_val[0]
    return series


def _arranged(series: Series) -> Report:
    samples_of_step = series.get(STEP) or series[STEP.replace("/", "_")]
    # After a resume a step may be there twice, with other samples before it: the later one counts.
    samples = sorted({step: number for number, step in samples_of_step.items()}.values())
    report = Report([int(samples_of_step[number]) for number in samples])
    by_expert: dict[str, dict[int, list[float | None]]] = defaultdict(dict)
    for name, values in series.items():
        taken = [values.get(number) for number in samples]
        if metric := _METRIC.fullmatch(name):
            report.metrics.setdefault(metric[2], {})[metric[1]] = taken
        elif expert := _EXPERT.fullmatch(name):
            by_expert[expert[1]][int(expert[2])] = taken
    report.tokens = {layer: [of[expert] for expert in sorted(of)] for layer, of in by_expert.items()}
    return report


def _by_number(path: str) -> list[tuple[int, int, str]]:
    """A key that puts layer 10 behind layer 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")]
