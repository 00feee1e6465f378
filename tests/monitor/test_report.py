"""`ds-etp report` on what DeepSpeed's monitors wrote; and the counter itself."""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_etp.cli.main import main
from ds_etp.cli.report_chart import loads_of, panels
from ds_etp.errors import ConfigError
from ds_etp.monitor.read import read_report
from ds_etp.monitor.router_load import RouterLoad, expert_counts
from tests.dispatch.host_syncs import HostSyncs
from tests.launcher import Launcher
from tests.monitor.runs import shown, train_shown, written
from tests.oracle import Recipe
from tests.sharded import Layout

RECIPE = Recipe(steps=6)
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


@pytest.fixture(scope="module")
def run(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of three reports wrote: as CSV, and as TensorBoard's files where that is installed."""
    folder = tmp_path_factory.mktemp("monitored")
    layout = shown(Layout(1), folder)
    if HAS_TENSORBOARD:
        tensorboard = {"enabled": True, "output_path": str(folder / "tensorboard"), "job_name": "run"}
        layout = replace(layout, extra=(*layout.extra, ("tensorboard", tensorboard)))
    launcher.run(1, train_shown, recipe=RECIPE, layout=layout)
    return folder


def first_to_last(values: list[float], form: str) -> str:
    """As the table has it: one number where both are the same."""
    first, last = format(values[0], form), format(values[-1], form)
    return first if first == last else f"{first} -> {last}"


def test_what_is_printed_and_drawn(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values, picture = written(run), tmp_path / "load.png"
    assert main(["report", str(run / "run"), "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[:1] == "│"]
    layer = "model.layers.0.mlp"
    ratio, entropy = (values[f"router_{name}_{layer}"] for name in ("max_over_mean", "entropy"))
    assert "3 reports, steps 2 to 6" in out
    assert rows[0] == [
        layer,
        first_to_last(ratio, ".2f"),
        f"{max(ratio):.2f}",
        first_to_last(entropy, ".3f"),
        "0",
        "0.00",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG") and f"drawn: {picture}" in out


def test_what_is_drawn(run: Path) -> None:
    report, values = read_report(run / "run"), written(run)
    assert report.steps == [2, 4, 6] and report.layers == ["model.layers.0.mlp", "model.layers.1.mlp"]
    counts = [values[f"router_tokens_model.layers.1.mlp_{expert}"][1] for expert in range(4)]
    assert sum(counts) == 2 * 2 * 12 * 2  # steps, rows, tokens of a row, experts a token
    assert loads_of(report, report.layers, 1)[1] == pytest.approx([count / (sum(counts) / 4) for count in counts])
    assert panels(1) == [0] and panels(3) == [0, 1, 2] and panels(101) == [0, 20, 40, 60, 80, 100]


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="tensorboard isn't installed")
def test_tensorboard_says_the_same(run: Path) -> None:
    ours, theirs = read_report(run / "run"), read_report(run / "tensorboard")
    assert (theirs.steps, theirs.tokens) == (ours.steps, ours.tokens)
    for layer, metrics in ours.metrics.items():
        for name, values in metrics.items():
            assert theirs.metrics[layer][name] == pytest.approx(values, rel=1e-6), name  # TensorBoard's are fp32


def test_tensorboard_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        read_report(tmp_path)


def csv_files(folder: Path, rows: dict[str, str]) -> Path:
    """A folder of CSV files, by name."""
    folder.mkdir()
    for name, text in rows.items():
        (folder / f"{name}.csv").write_text(text.replace(" ", "\n") + "\n", encoding="utf-8")
    return folder


def test_a_run_that_was_resumed(tmp_path: Path) -> None:
    """From step 2, with half as many samples a step: DeepSpeed writes a second header, and steps 3 to 4 once more."""
    files = {
        "router_global_step": "step,router_global_step 80,2 160,4 step,router_global_step 120,4 160,6",
        "router_entropy_a.mlp": "step,a.mlp 80,0.5 160,0.6 step,a.mlp 120,0.7 160,0.8",
        "router_max_over_mean_a.mlp": "step,a.mlp 80,3 step,a.mlp 160,2",
        "Train_Samples_lr": "step,lr 80,1",
    }
    report = read_report(csv_files(tmp_path / "run", files))
    assert report.steps == [2, 4, 6]
    assert report.metrics == {"a.mlp": {"entropy": [0.5, 0.7, 0.8], "max_over_mean": [3, None, 2]}}


def test_no_run_and_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no numbers of routers" in capsys.readouterr().err
    for name in ("one", "two"):
        csv_files(tmp_path / name, {"router_global_step": "step,x 8,2"})
    assert main(["report", str(tmp_path)]) == 2
    assert f"holds 2 runs. Name one: {tmp_path}/one, {tmp_path}/two" in capsys.readouterr().err


def test_the_counter_asks_nothing_of_the_device() -> None:
    torch.manual_seed(0)
    index, weight = torch.randint(0, 9, (50, 3)), torch.ones(1, requires_grad=True)  # 7 and 8 are no experts
    expected, tokens = torch.bincount(index.flatten(), minlength=9)[:7], torch.ones(50, 1)
    load = RouterLoad(7)
    copied = copy.deepcopy(load)
    with HostSyncs(index, weight, tokens) as syncs:
        for _ in range(2):
            output = weight * tokens
            load.observe(index, output, rows_sent=5)
            output.backward(tokens)
        load.observe(index, weight * tokens, rows_sent=5)  # nobody trains on it
        with torch.no_grad():
            load.observe(index, weight * tokens, rows_sent=5)
    assert syncs.found == []
    counts, owned, rows = load.take(torch.device("cpu"))
    assert torch.equal(counts, 2 * expected) and (owned, rows) == (100, 10)
    assert torch.equal(expert_counts(index, 7), expected)
    for other in (load, copied):
        counts, owned, rows = other.take(torch.device("cpu"))
        assert counts.sum() == owned == rows == 0
