"""Which forward experts run with the installed transformers, and that the log says so."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import pytest
import torch.distributed as dist
from packaging.version import Version

from ds_etp import log
from ds_etp.patches.transformers import grouped_mm
from ds_etp.patches.versions import TRANSFORMERS_GROUPED_LINEAR
from tests.dispatch.test_grouped_mm import sorted_calls
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

# Of the corners of the host range, 5.0 has other arguments.
FAST = Version(version("transformers")) >= Version(TRANSFORMERS_GROUPED_LINEAR)
EP = Layout(world=2, ep=2)
GROUPED = Recipe(implementation="grouped_mm", dp=2)


@pytest.mark.compat
def test_sorted_rows_run_where_they_should(launcher: Launcher) -> None:
    """A release that renames what the forward for sorted rows needs fails here, and is only slower for a user."""
    assert (grouped_mm.host_fault() == "") is FAST, grouped_mm.host_fault()
    calls = 2 if FAST else 0  # of two layers
    assert launcher.run(2, sorted_calls, recipe=GROUPED, layout=EP) == [calls, calls]


def said(recipe: Recipe, layout: Layout, without: str = "") -> list[str]:
    """What this rank logs when an engine is made, with a transformers that has no function of one name."""
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: Any) -> None:
            records.append(record.getMessage())

    logger, handler = log.logger(), Keep()  # set up first: with a handler it would be taken to be the application's
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if without:
                patch.delattr(grouped_mm.moe, without)
            make_engine(recipe, layout).destroy()
    finally:
        logger.removeHandler(handler)
    assert dist.get_rank() == 0 or not records
    return records


@pytest.mark.compat
def test_the_log_says_which(launcher: Launcher) -> None:
    def table(recipe: Recipe, layout: Layout, without: str = "") -> tuple[str, list[str]]:
        first, *others = launcher.run(2, said, recipe=recipe, layout=layout, without=without)[0]
        (row,) = [line for line in first.splitlines() if "experts run" in line]
        return row.split("│")[2].strip(), [text for text in others if "grouped_mm" in text]

    row, warnings = table(GROUPED, EP)
    assert (row, len(warnings)) == (("grouped_mm, rows are sorted", 0) if FAST else ("grouped_mm, sorts rows again", 1))
    row, warnings = table(GROUPED, EP, "_grouped_linear")
    assert row == "grouped_mm, sorts rows again"
    assert len(warnings) == 1 and "has no _grouped_linear: experts run its own grouped_mm forward" in warnings[0]
    row, warnings = table(GROUPED, Layout(world=2, etp=2), "_grouped_linear")
    assert (row, len(warnings)) == ("grouped_mm, sorts rows again", 1)
    # Where nothing is sorted there is nothing to lose.
    assert table(Recipe(dp=2), EP, "_grouped_linear") == ("eager", [])
