"""`ds-etp topology` and `ds-etp check`: what they print, where, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_etp.cli.main import main


def config_file(folder: Path, content: object) -> str:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def rows(text: str) -> list[list[str]]:
    """The body cells of every printed table."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def test_topology_prints_groups_and_places(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world", "8", "--tp", "4", "--etp", "2", "--ep", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    table = rows(out)
    assert ["expt_tp", "{0,1} {2,3} {4,5} {6,7}"] in table
    assert ["ep", "{0,2} {1,3} {4,6} {5,7}"] in table
    assert ["expert_dp", "{0,4} {1,5} {2,6} {3,7}"] in table
    assert ["expert_model_parallel", "{0..3} {4..7}"] in table
    assert ["6", "2", "0", "1", "0", "0", "1", "1"] in table  # rank, tp, cp, dp, pp, etp, ep, edp
    assert ["etp", "2"] in table


def test_topology_etp_defaults_to_tp(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world", "4", "--tp", "2"]) == 0
    table = rows(capsys.readouterr().out)
    assert ["etp", "2 (auto: = tp)"] in table
    assert ["expt_tp", "{0,1} {2,3}"] in table


def test_topology_lists_one_row_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world", "16", "--pp", "2", "--cp", "2"]) == 0
    ranks = [row[0] for row in rows(capsys.readouterr().out) if len(row) == 8]
    assert ranks == [str(rank) for rank in range(16)]


def test_topology_that_does_not_tile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--world", "8", "--tp", "2", "--etp", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("expert_tensor_parallel.etp_size=3 does not tile the ranks")
    assert "Traceback" not in err


@pytest.mark.parametrize("size", ["0", "-1", "2.0", "two"])
def test_sizes_are_whole_numbers(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["topology", "--world", size])
    assert exit_.value.code == 2
    assert "whole number of at least 1" in capsys.readouterr().err


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "usage: ds-etp" in capsys.readouterr().err


def test_check_prints_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"tensor_parallel": {"autotp_size": 4}, "expert_tensor_parallel": {"ep_size": 2, "dispatcher": "alltoall"}}
    assert main(["check", config_file(tmp_path, config), "--gpus", "16"]) == 0
    table = rows(capsys.readouterr().out)
    expected = [
        ["world", "16"],
        ["tp", "4"],
        ["cp", "1"],
        ["pp", "1"],
        ["dp", "4"],
        ["etp", "4 (auto: = tp)"],
        ["ep", "2"],
        ["edp", "2"],
        ["dispatcher", "alltoall"],
    ]
    assert table == expected


def test_check_takes_the_axes_the_file_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, {"expert_tensor_parallel": {"etp_size": 2}})
    for axis, dp, edp in (("cp", "4", "8"), ("pp", "4", "2")):
        assert main(["check", path, "--gpus", "16", f"--{axis}", "4"]) == 0
        table = rows(capsys.readouterr().out)
        assert [axis, "4"] in table
        assert ["dp", dp] in table
        assert ["edp", edp] in table


def test_check_refuses_axes_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, {"zero_optimization": {"stage": 3}, "expert_tensor_parallel": {}})
    assert main(["check", path, "--gpus", "16", "--pp", "4"]) == 2
    assert "zero_optimization.stage=3 does not work with pipeline parallel size 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"expert_tensor_parallel": {"etp_sise": 2}}, "did you mean 'etp_size'?"),
        ({"expert_tensor_paralel": {}}, "did you mean 'expert_tensor_parallel'?"),
        ({"expert_tensor_parallel": {"etp_size": 3}}, "expert_tensor_parallel.etp_size=3 does not tile the ranks"),
        ({"expert_tensor_parallel": {"etp_size": 2, "dispatcher": "replicated"}}, "dispatcher='replicated' needs"),
        (
            {"expert_tensor_parallel": {}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size=8 is not supported",
        ),
        ({"train_batch_size": 8}, 'has no "expert_tensor_parallel" block'),
    ],
)
def test_check_reports_on_stderr(
    config: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", config_file(tmp_path, config), "--gpus", "8"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_check_of_a_disabled_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, {"expert_tensor_parallel": {"enabled": False, "etp_size": 3}})
    assert main(["check", path, "--gpus", "8"]) == 0
    assert "not enabled" in capsys.readouterr().out
