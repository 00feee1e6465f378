"""`ds-etp plan`: what it prints and writes, and what it says of models and machines it can't plan for."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ds_etp.cli.main import main
from tests.planner.configs import path_of, values_of

QWEN = str(path_of("Qwen3-30B-A3B"))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal no table is wrapped in."""
    monkeypatch.setenv("COLUMNS", "240")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def test_plan_prints_layouts_memory_time_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", QWEN, "--gpus", "16", "--memory", "80GB", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "Qwen3-30B-A3B: 30.5B parameters, 3.0B of them a token, on 16 GPUs, 8 a node" in out
    layouts = [row for row in cells(out) if len(row) == 14]
    assert [row[0] for row in layouts] == ["1", "2", "3"]
    assert layouts[0][1:7] == ["1", "1", "8", "2", "2", "alltoall"]
    assert layouts[0][8] == "yes"
    lines = [row[1] for row in cells(out) if len(row) == 3]
    for name in ("parameters", "gradients", "optimizer", "activations (in backward)", "dispatch buffers (in backward)"):
        assert name in lines
    assert {"experts", "tokens to experts and back", "data parallel", "peak"} <= set(lines)
    assert "- EP is the right tool here" in out


def test_plan_writes_what_check_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    arguments = ["plan", "--model", QWEN, "--gpus", "16", "--choose", "3", "--zero", "1", "--micro-batch", "2"]
    assert main([*arguments, "--write", str(path)]) == 0
    out = capsys.readouterr().out
    row = next(row for row in cells(out) if row[0] == "3" and len(row) == 14)
    config = json.loads(path.read_text())
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["zero_optimization"]["stage"] == 1
    block = config["expert_tensor_parallel"]
    assert [str(block["etp_size"]), str(block["ep_size"]), block["dispatcher"]] == [row[2], row[3], row[6]]
    assert main(["check", str(path), "--gpus", "16"]) == 0
    assert ["ep", row[3]] in cells(capsys.readouterr().out)


@pytest.mark.parametrize(("axis", "size"), [("cp", "4"), ("pp", "3")])
def test_plan_says_what_no_config_holds(
    axis: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    gpus = ["--gpus", "24"]
    assert main(["plan", "--model", QWEN, *gpus, f"--{axis}", f"{size},", "--top", "2", "--write", str(path)]) == 0
    out = capsys.readouterr().out
    layouts = [row for row in cells(out) if len(row) == 15]
    assert [row[2] for row in layouts] == [size, size]
    what = {row[1] for row in cells(out) if len(row) == 3}
    assert what >= ({"Ulysses"} if axis == "cp" else {"pipeline messages", "pipeline bubble"})
    assert f"- {axis} {size} is set up by the script" in out
    assert json.loads(path.read_text())["gradient_accumulation_steps"] == (12 if axis == "pp" else 1)
    command = out.partition("Check it: ds-etp ")[2].split()
    assert command == ["check", str(path), *gpus, f"--{axis}", size, "--model", QWEN]
    assert main(command[:-2]) == 0
    assert [axis, size] in cells(capsys.readouterr().out)


def test_plan_takes_a_folder_and_counts_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    values = values_of("Qwen3-30B-A3B") | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(values))
    outputs = []
    for extra in ([], ["--exact"]):
        assert main(["plan", "--model", str(folder), "--gpus", "8", "--zero", "2", *extra]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0].startswith("My-Model: 1.9B parameters, 0.4B of them a token")
    memory = [[row for row in cells(out) if row[1:2] == ["parameters"]] for out in outputs]
    assert memory[0] == memory[1]


def test_plan_draws(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", "--model", QWEN, "--gpus", "16", "--chart", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plan_says_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", QWEN, "--gpus", "2", "--memory", "24GB"]) == 1
    assert "- No layout fits: the smallest, tp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "none.json", "--gpus", "8"], "--model none.json: no such file or folder"),
        (["--model", QWEN, "--gpus", "8", "--memory", "much"], "--memory='much' is not an amount of bytes"),
        (["--model", QWEN, "--gpus", "8", "--link", "intra"], "--link="),
        (["--model", QWEN, "--gpus", "8", "--nodes", "3"], "--nodes 3 does not divide 8 GPUs"),
        (["--model", QWEN, "--gpus", "12"], "8 ranks a node do not divide 12 GPUs: give --nodes"),
        (["--model", QWEN, "--gpus", "8", "--tflops", "0"], "flops=0.0 is not above 0"),
        (["--model", QWEN, "--gpus", "8", "--choose", "5000"], "--choose 5000: there are"),
        (["--model", QWEN, "--gpus", "8", "--pp", "4,", "--zero", "2"], "No layout of Qwen3-30B-A3B works on 8 GPUs"),
        (["--model", QWEN, "--gpus", "8", "--chart", "plan.unknown"], "--chart plan.unknown"),
        (["--model", QWEN, "--gpus", "8", "--write", "no/such/folder/ds.json"], "no/such/folder/ds.json"),
        (["--model", __file__, "--gpus", "8"], "is not JSON"),
        (
            ["--model", "no-one/no-model", "--gpus", "8"],
            "its config.json can't be had from the hub",
        ),  # tests are offline
    ],
)
def test_plan_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("size", ["0", "1,x", ",", "-2"])
def test_sizes_that_are_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", QWEN, "--gpus", "8", f"--cp={size}"])
    assert "is no size and no list of sizes" in capsys.readouterr().err


def test_plan_names_what_a_config_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    for change, message in (
        ({"model_type": "another"}, "model_type='another' is not a family whose parameters are counted"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None is not a size"),
    ):
        path.write_text(json.dumps(values_of("Qwen3-30B-A3B") | change))
        assert main(["plan", "--model", str(path), "--gpus", "8"]) == 2
        assert message in capsys.readouterr().err


def test_plan_needs_no_torch_and_little_time() -> None:
    code = (
        "import sys, ds_etp.cli.main; assert ds_etp.cli.main.main(sys.argv[1:]) == 0; "
        "print([name for name in ('torch', 'deepspeed', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "plan", "--model", str(path_of("DeepSeek-V3")), "--gpus", "512"]
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("[]")
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime < 2  # of the CPU: other jobs may run too
