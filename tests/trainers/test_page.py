"""docs/trainers.md shows the commands that `make trainers` runs, and what came out when it ran them last.

Nothing is run here: that takes environments of their own, and minutes.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.trainers.cases import CONFIGS, LAYOUTS, ROOT, Trainer, cases, data_command
from tests.trainers.environments import REQUIREMENTS
from tests.trainers.registry import TRAINERS
from tests.trainers.report import BEGIN, END, PAGE, generated, read

each = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)


def shown_commands() -> list[str]:
    """Every command of the page, with its environment variables."""
    found: list[str] = []
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            found.append(" ".join(part.split("\n")[0].split()))
    return found


def test_every_command_is_one_that_is_run() -> None:
    run = {case.command for trainer in TRAINERS for case in cases(trainer)} | {data_command(), "make trainers"}
    shown = shown_commands()
    assert shown and set(shown) <= run, set(shown) - run
    with_results = [trainer for trainer in TRAINERS if read(trainer)]
    in_columns = {case.command for trainer in with_results for case in cases(trainer) if case.column}
    assert in_columns <= set(shown)


@each
def test_results_are_of_these_commands(trainer: Trainer) -> None:
    if not read(trainer):
        assert f"not run yet: {trainer.title}" in PAGE.read_text() or f", {trainer.title}." in PAGE.read_text()
        pytest.skip("not run yet, which the page says")
    results = read(trainer)["cases"]
    assert {case.id: case.command for case in cases(trainer)} == {
        id: result["command"] for id, result in results.items()
    }, "make trainers has not been run since the cases were changed"


def test_the_page_has_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == generated().strip()


@each
def test_requirements_are_exact_and_bring_no_torch(trainer: Trainer) -> None:
    lines = [
        line
        for line in (REQUIREMENTS / f"{trainer.name}.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines and all(re.fullmatch(r"[\w.\-]+==[\w.!+]+", line) for line in lines)
    assert not {line.partition("==")[0].lower() for line in lines} & {"torch", "torchvision", "triton"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_is_what_its_config_says(layout: object) -> None:
    from tests.trainers.cases import Layout

    assert isinstance(layout, Layout)
    config, plain = (json.loads((ROOT / CONFIGS / f"{name}.json").read_text()) for name in (layout.name, layout.plain))
    block = config.pop("expert_tensor_parallel")
    assert (block.get("etp_size", 1), block.get("ep_size", 1)) == (layout.etp, layout.ep)
    assert config.pop("tensor_parallel", {"autotp_size": 1}) == {"autotp_size": layout.tp}
    assert config == plain and plain["zero_optimization"]["stage"] == layout.stage
