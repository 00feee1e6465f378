"""`ds-etp report`: the router numbers that a run wrote through DeepSpeed's monitor, as a table and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from ds_etp.log import console_for_tables
from ds_etp.monitor.metrics import ENTROPY, MAX_OVER_MEAN, ROWS_SENT, UNUSED
from ds_etp.monitor.read import Report, read_report

_PIPED_WIDTH = 120  # where the output is no terminal
_PICTURE = "router_load.png"


def add_report(commands: Any) -> None:
    """Adds the subcommand to an argparse's subparsers."""
    report = commands.add_parser("report", help="show the load of a run's routers, from its CSV or TensorBoard files")
    report.add_argument(
        "folder", metavar="RUN", type=Path, help="folder that DeepSpeed's csv_monitor or tensorboard wrote to"
    )
    report.add_argument("--out", type=Path, help=f"picture file to draw (default {_PICTURE} in the folder)")
    report.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Prints a line for each layer, and draws layers x experts over steps.

    Raises:
        ConfigError: there are no numbers of one run, or a package is missing.
    """
    report = read_report(args.folder)
    console = console_for_tables(_PIPED_WIDTH)
    console.print(_table(report))
    from ds_etp.cli.report_chart import draw

    out = args.out or args.folder / _PICTURE
    draw(out, report)
    console.print(f"drawn: {out}", soft_wrap=True)
    return 0


def _table(report: Report) -> Table:
    first, last = report.steps[0], report.steps[-1]
    title = f"Router load by layer, {len(report.steps)} reports, steps {first} to {last}"
    table = Table(title=title, title_justify="left")
    table.add_column("layer", overflow="fold")
    for name in ("most loaded / mean", "its worst", "entropy", "experts without tokens", "rows sent a token"):
        table.add_column(name)
    for layer in report.layers:
        metrics = report.metrics[layer]
        worst = max((value for value in metrics[MAX_OVER_MEAN] if value is not None), default=None)
        table.add_row(
            layer,
            _first_to_last(metrics[MAX_OVER_MEAN], ".2f"),
            "" if worst is None else f"{worst:.2f}",
            _first_to_last(metrics[ENTROPY], ".3f"),
            _first_to_last(metrics[UNUSED], ".0f"),
            _first_to_last(metrics[ROWS_SENT], ".2f"),
        )
    return table


def _first_to_last(values: list[float | None], form: str) -> str:
    """`1.52 -> 1.08`, or one number where there is no other."""
    known = [f"{value:{form}}" for value in values if value is not None]
    return " -> ".join(dict.fromkeys((known[0], known[-1]))) if known else ""
