"""`python -m benchmarks.node --check`: on two CPU ranks all that needs no CUDA, and all of it on GPUs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import node_checks, node_layers, node_runs, torchrun
from benchmarks.cases import Case
from benchmarks.node_checks import CHECKS, Result
from benchmarks.pool import LaunchFailed
from ds_etp.dispatch import routing_table
from ds_etp.dispatch.alltoall import EPFirst
from ds_etp.dispatch.cost import tokens_are_replicated
from ds_etp.dispatch.registry import DISPATCHERS
from ds_etp.parallel.topology import Topology
from tests.launcher import Launcher

GPUS = torch.cuda.device_count()


@pytest.mark.sample("host reads", "resume")
@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if not check.cuda])
def test_on_two_cpu_ranks(launcher: Launcher, tmp_path: Path, name: str) -> None:
    options = {"same bits": {"steps": 4}, "times": {"steps": 2}}.get(name, {})
    result = node_checks.merge(launcher.run(2, node_checks.run, name=name, folder=str(tmp_path), **options))
    assert result.ok, result.line()


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpus(tmp_path: Path, name: str) -> None:
    world = 1 << (GPUS.bit_length() - 1)
    if why := node_checks.missing(CHECKS[name], world):
        pytest.skip(why)
    result = node_checks.merge(torchrun.run(world, "benchmarks.node_checks:run", name=name, out=str(tmp_path)))
    assert result.ok, result.line()


def one_more_read(self: Any, partial: Tensor, rows: Any, overlap_fn: Any = None) -> Tensor:
    if dist.get_rank() == 1:
        routing_table.to_host(partial.detach()[:1, 0].long())
    return RIGHT_COMBINE(self, partial, rows, overlap_fn)


def without_sentinels(module: Any) -> Any:
    """Sentinels are the last expert's rows."""
    forward = RIGHT_FORWARD(module)
    return lambda x, index, weights, _: forward(x, index.clamp(max=module.num_experts - 1), weights, False)  # type: ignore[misc]


def other_bits(engine: Any) -> dict[str, Tensor]:
    """Each time other ones, on rank 1."""
    found = RIGHT_STATE(engine)
    if dist.get_rank() == 1:
        next(iter(found.values())).add_(next(COUNTER))
    return found


RIGHT_COMBINE, RIGHT_FORWARD, RIGHT_STATE = EPFirst.combine, node_layers.sorted_forward, node_runs.state
COUNTER = itertools.count()
FAULTS = {
    "host reads": (EPFirst, "combine", one_more_read),
    "grouped_mm": (node_layers, "sorted_forward", without_sentinels),
    "resume": (node_checks, "state", other_bits),
}


def run_spoiled(name: str, folder: str) -> dict[str, Any]:
    """A check with a fault in what it checks."""
    with mock.patch.object(*FAULTS[name]):  # type: ignore[call-overload]
        found: dict[str, Any] = node_checks.run(name, folder)
        return found


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("name", "figure"), [("host reads", "alltoall 2 + 0"), ("grouped_mm", "sentinels nan"), ("resume", "1 of ")]
)
def test_a_fault_on_some_rank_fails(launcher: Launcher, tmp_path: Path, name: str, figure: str) -> None:
    result = node_checks.merge(launcher.run(2, run_spoiled, name=name, folder=str(tmp_path)))
    assert result.ok is False and figure in result.figure, result.line()


def test_every_check_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Skipped, failed with the launch, failed on a rank, and right; the exit status follows."""
    answers: dict[str, Any] = {
        "resume": LaunchFailed("Traceback\nRuntimeError: no luck\ntorchrun: 1"),
        "times": [vars(Result("times", True, "1 ms")), vars(Result("times", False, "2 ms"))],
    }

    def run(world: int, function: str, name: str, out: str) -> list[Any]:
        answer = answers.get(name, [vars(Result(name, True, "fine"))] * world)
        if isinstance(answer, LaunchFailed):
            raise answer
        found: list[Any] = answer
        return found

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert node_checks.show(2, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    by_name = {line[:14].strip(): line[15:] for line in lines}
    assert by_name["sync debug"] == "skipped (no CUDA)"
    assert (
        by_name["resume"] == "FAIL  RuntimeError: no luck" and "no luck" in (tmp_path / "check-resume.log").read_text()
    )
    assert by_name["times"] == "FAIL  rank 1: 2 ms"
    assert by_name["same bits"] == "ok    fine"
    answers.clear()
    assert node_checks.show(2, tmp_path) == 0


def test_time_that_is_hidden() -> None:
    """Messages of 2 + 3; work that overlaps with itself counts once."""
    messages, work = [(0.0, 2.0), (4.0, 6.0), (5.0, 7.0)], [(1.0, 5.0), (1.5, 4.5), (6.5, 9.0)]
    assert node_layers.shared_time(messages, work) == (5.0, 1.0 + 1.0 + 0.5)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_layouts_fit(world: int) -> None:
    """Those with tensor-parallel attention last, and every dispatcher once where there are peers."""
    rows: list[Case] = node_runs.cases_on(world)
    assert [row.tp for row in rows] == sorted(row.tp for row in rows)
    assert world == 1 or {row.dispatcher for row in rows} == set(DISPATCHERS)
    for row in rows:
        topology = Topology(world, tp=row.tp, ep=row.ep, etp=row.etp)
        assert row.dispatcher != "replicated" or tokens_are_replicated(topology)
        assert node_runs.ON_GPUS.experts % row.ep == 0 and node_runs.ON_GPUS.intermediate % row.etp == 0
