"""The part of docs/trainers.md between its markers: what was run, with which releases, and how far results differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.trainers.cases import LAYOUTS, RESUMED_IN, ROOT, SAVED_IN, Case, Trainer, cases
from tests.trainers.registry import TRAINERS

PAGE = ROOT / "docs" / "trainers.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- written by make trainers -->", "<!-- end -->"
COLUMNS = {"full": "full", "lora": "LoRA", "dpo": "DPO", "resume": "resume", "export": "export"}
WIDTH = 112  # of a line with a command


def write_page() -> None:
    """Writes the results into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{generated()}\n{END}{after}", encoding="utf-8")


def generated() -> str:
    """The table and the commands of every trainer that has results."""
    lines = [
        "| trainer | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    shown = [(trainer, read(trainer)) for trainer in TRAINERS]
    lines += [_row(trainer, results) for trainer, results in shown if results]
    if missing := ", ".join(trainer.title for trainer, results in shown if not results):
        lines += ["", f"`make trainers` has commands of these too, which were not run yet: {missing}."]
    for trainer, results in shown:
        if results:
            lines += ["", *_section(trainer, results)]
    return "\n".join(lines) + "\n"


def read(trainer: Trainer) -> dict[str, Any]:
    """A trainer's stored results; empty if there are none."""
    path = RESULTS / f"{trainer.name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _row(trainer: Trainer, results: dict[str, Any]) -> str:
    cells = []
    for column, title in COLUMNS.items():
        mine = [case for case in cases(trainer) if case.column == column]
        found = [results["cases"][case.id] for case in mine if case.id in results["cases"]]
        text = _apart(found) if len(found) == len(mine) else f"{len(mine) - len(found)} of {len(mine)} failed"
        reasons = [reason for cell, reason in trainer.left_out.items() if cell.split()[0] == column]
        text = text if mine else "no"
        anchor = f"#{trainer.title.lower()}-{title.lower()}".replace(".", "")
        cells.append("; ".join([f"[{text}]({anchor})" if mine else text, *reasons]))
    releases = results["releases"]
    names = ", ".join(f"{name} {releases[name]}" for name in [*trainer.packages[1:], "deepspeed", "torch"])
    return f"| {trainer.title} {releases[trainer.packages[0]]} with {names} | " + " | ".join(cells) + " |"


def _apart(found: Iterable[dict[str, Any]]) -> str:
    """The largest differences of some cases, in words."""
    rows, words = list(found), []
    for kind in ("losses", "weights"):
        values = [row[kind] for row in rows if row.get(kind) is not None]
        if values:
            words.append(f"{kind} {_digits(max(values))}")
    return ", ".join(words) + " apart" if words else "run"


def _digits(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def _section(trainer: Trainer, results: dict[str, Any]) -> Iterator[str]:
    yield f"## {trainer.title}"
    for note in trainer.notes:
        yield from ("", note)
    for column, title in COLUMNS.items():
        mine = [case for case in cases(trainer) if case.column == column]
        reasons = [f"`{cell}`: {reason}." for cell, reason in trainer.left_out.items() if cell.split()[0] == column]
        if not mine and not reasons:
            continue
        yield from ("", f"### {trainer.title}: {title}", "")
        mine = [case for case in mine if case.id in results["cases"]]
        yield from (_sentence(case, results["cases"][case.id]) for case in mine)
        yield from reasons
        if mine:
            yield from ("", "```console", *(line for case in mine for line in _lines(case.command)), "```")


def _sentence(case: Case, result: dict[str, Any]) -> str:
    label = {layout.name: layout.label for layout in LAYOUTS}
    words = case.id.split()
    about = label.get(words[-1], "")
    if case.column == "resume":
        about = f"saved in {SAVED_IN.label}, gone on with in {RESUMED_IN.label}"
    elif case.column == "export":
        about = "the adapter, merged by the trainer" if words[-1] == "lora" else "the model out of a checkpoint"
    return f"- {about}: {_apart([result])}"


def _lines(command: str) -> Iterator[str]:
    """A command as a page shows it, broken where it is long."""
    line = "$"
    for word in command.split():
        if len(line) + 1 + len(word) > WIDTH:
            yield f"{line} \\"
            line = "   "
        line += f" {word}"
    yield line
