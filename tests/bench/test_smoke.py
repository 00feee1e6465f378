"""The benchmark command at its smallest: that it runs and writes what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import node
from benchmarks.__main__ import main
from benchmarks.cases import cases, overlap_cases, plan_cases
from benchmarks.routing import ORDERS, SIZES, host_rows
from benchmarks.runs import Samples, ratio

HEADINGS = {
    "times": "Time of a step",
    "dispatchers": "Dispatchers",
    "overlap": "Overlap",
    "messages": "Messages",
    "memory": "Peak memory",
    "wire": "On the wire",
    "groups": "Growth of groups",
    "routing": "Growth of routing on the host",
}


@pytest.mark.sample("times-wire-groups-routing")
@pytest.mark.parametrize(
    "parts",
    [("times", "wire", "groups", "routing"), ("dispatchers", "overlap", "messages", "memory")],
    ids="-".join,
)
def test_a_run_writes_a_page_and_charts(tmp_path: Path, parts: tuple[str, ...]) -> None:
    compared = ["transformers tp", "ds_etp tp = etp"]
    main(["--smallest", "--out", str(tmp_path), "--parts", *parts, "--cases", *compared])
    page = (tmp_path / "results.md").read_text()
    assert {part for part, heading in HEADINGS.items() if f"## {heading}" in page} == set(parts)
    assert "failed" not in page and "Error" not in page
    charts = {path.name for path in tmp_path.glob("*.png")}
    if "times" in parts:
        assert "ds_etp tp = etp (Replicated)" in page
        assert charts == {"times.png", "wire.png", "groups.png"}
    else:
        assert "| tp = etp | Replicated |" in page


@pytest.mark.full
def test_the_node_script_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node.main(["--cpu", "--world", "1", "--rounds", "1", "--steps", "1", "--parts", "layers", "--out", str(tmp_path)])
    assert "One process" in capsys.readouterr().out
    assert "## Growth of a layer" in (tmp_path / "results.md").read_text()


def test_routing_on_the_host_hardly_grows_with_ep() -> None:
    """In vectors: sixteen times the ranks at no more than twice the time, which launches are most of. Measured: 1.2."""
    small, _, large = host_rows("", list(SIZES), 100)
    for order in ORDERS:
        assert large[order] < 2 * small[order], f"{order}: {small[order]:.1e} and {large[order]:.1e} s"


def test_ratios_are_of_steps_that_follow_each_other() -> None:
    own, peer = (Samples(step=[[1.0, 9.0, 4.0], row, [3.0]]) for row in ([7.0], [16.0]))
    peer.step[0], peer.step[2] = [2.0, 9.0, 16.0], [4.0]
    assert ratio(own, peer, "step") == 0.5
    assert ratio(own, Samples(error="failed"), "step") is None


@pytest.mark.parametrize("world", [2, 4, 8])
def test_cases_have_names_of_their_own(world: int) -> None:
    keys = [(case.environment, case.name) for case in [*cases(world), *plan_cases(world), *overlap_cases(world)]]
    assert len(keys) == len(set(keys))
