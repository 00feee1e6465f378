"""The same script under every launcher, and the config files that are shipped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig

from ds_etp.config.block import check_dispatcher, parse_block, resolve
from ds_etp.config.deepspeed import autotp_size
from ds_etp.config.host_rules import check_host_options
from tests.launch.train_tiny import STEPS, make_batch, make_model

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_tiny.py")
BIN = Path(sys.executable).parent
# Seconds. A launch takes 15 on two idle cores, most of it imports; the first one on a machine also compiles
# DeepSpeed's CPU collectives, which takes minutes on busy cores, and leaves a lock behind if it is killed.
LIMIT = 400
RATE = 0.1

ON_CPU = torch.cuda.device_count() < 2


# The script under each launcher


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file; SGD without clipping is easy to repeat in a few lines of torch."""
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "expert_tensor_parallel": {"etp_size": 2},
    }
    path = tmp_path_factory.mktemp("launch") / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def unsharded() -> list[float]:
    """The losses of the same training in this process, in plain torch."""
    model = make_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [make_batch(step, rank) for rank in range(2)]
        loss = torch.stack([model(input_ids=ids, labels=ids).loss for ids in batches]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(command: list[str]) -> tuple[int, str]:
    """Runs a launcher to its end. Returns its exit code and all that it and its ranks printed."""
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")])),
    }
    if ON_CPU:
        environment["DS_ACCELERATOR"] = "cpu"
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} took more than {LIMIT} s:\n{output[-4000:]}")
    finally:
        end_group(process.pid)
    return process.returncode, output


# What a rank of the pool of workers has, and a launcher would take for its own.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def end_group(group: int) -> None:
    """Ends whatever is left of a launcher's process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left: the usual end


def deepspeed_launcher(*arguments: str) -> list[str]:
    """The `deepspeed` command on two ranks."""
    return [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", str(free_port()), *arguments]


def torchrun(*arguments: str) -> list[str]:
    """The `torchrun` command on two ranks."""
    return [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port()), *arguments]


def commands(config: Path, *flags: str) -> dict[str, list[str]]:
    """Each way to start the script."""
    arguments = [str(SCRIPT), "--deepspeed", str(config), *flags]
    return {
        "module": deepspeed_launcher("--module", "ds_etp", *arguments),
        "register": deepspeed_launcher(*arguments, "--register"),
        "torchrun": torchrun("-m", "ds_etp", *arguments),
        # The launcher starts processes of its own on a script that knows nothing of ds_etp.
        "environment": [str(BIN / "ds-etp"), "run", "--", *torchrun(*arguments)],
    }


WAYS = ["module", "register", "torchrun", "environment"]


@pytest.fixture(scope="module")
def results(config: Path) -> Callable[[str], dict[str, Any]]:
    """What the script printed under a launcher; each is started once."""

    @cache
    def result(way: str) -> dict[str, Any]:
        code, output = launch(commands(config)[way])
        lines = [line for line in output.splitlines() if line.startswith('{"losses"')]
        assert (code, len(lines)) == (0, 1), f"{way}:\n{output[-4000:]}"
        found: dict[str, Any] = json.loads(lines[0])
        return found

    return result


@pytest.mark.sample("module")
@pytest.mark.parametrize("way", WAYS)
def test_the_script_trains_sharded(results: Callable[[str], dict[str, Any]], unsharded: list[float], way: str) -> None:
    # [E, H, I]: I is 16, and this rank has half of it.
    assert results(way)["down_proj"] == [4, 32, 8]
    # fp32: the same sums in another order.
    assert results(way)["losses"] == pytest.approx(unsharded, rel=1e-6)


@pytest.mark.full
def test_the_ways_to_start_it_are_the_same(results: Callable[[str], dict[str, Any]]) -> None:
    # To the bit: the same program on the same data, and a sum of two numbers has one order.
    assert all(results(way) == results("module") for way in WAYS)


def test_a_block_that_nobody_reads_is_told_of(config: Path) -> None:
    """Installed, but neither asked for nor registered: experts stay whole, and the log says so, once."""
    code, output = launch(torchrun(str(SCRIPT), "--deepspeed", str(config)))
    result = json.loads(next(line for line in output.splitlines() if line.startswith('{"losses"')))
    assert (code, result["down_proj"]) == (0, [4, 32, 16])
    assert output.count("block that nobody reads: experts are NOT split") == 1
    assert "DS_ETP=1" in output and "ds-etp run" in output


@pytest.mark.full
def test_a_rank_that_raises_ends_the_job(config: Path) -> None:
    code, output = launch(commands(config, "--fail-on-rank", "1")["torchrun"])
    assert code != 0
    assert "RuntimeError: no more data on rank 1" in output, output[-4000:]
    assert '{"losses"' not in output, "the other rank went on"


# The config files

# The ranks each file fits, and the (etp, ep) it comes to there.
SHIPPED = {
    "demo.json": (4, 4, 1),
    "ep2_zero3.json": (2, 1, 2),
    "offload.json": (2, 2, 1),
    "pipeline.json": (2, 2, 1),  # ranks of one stage
    "tp_etp_ep.json": (4, 2, 2),
    "zero1.json": (2, 2, 1),
    "zero2.json": (2, 2, 1),
    "zero3.json": (2, 2, 1),
}


def shipped(name: str) -> dict[str, Any]:
    """One of the files in configs/."""
    content: dict[str, Any] = json.loads((ROOT / "configs" / name).read_text())
    return content


def test_every_config_file_is_tested() -> None:
    assert {path.name for path in (ROOT / "configs").glob("*.json")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("factor", [1, 2], ids=["smallest world", "twice as many"])
def test_config_files_are_valid(monkeypatch: pytest.MonkeyPatch, name: str, factor: int) -> None:
    content = shipped(name)
    world, etp, ep = SHIPPED[name]
    world *= factor
    block = parse_block(content)
    assert block is not None
    check_host_options(content, world)
    topology = resolve(block, world=world, tp=autotp_size(content))
    check_dispatcher(block, topology)
    assert (topology.etp, topology.ep, topology.edp) == (etp, ep, factor)
    # DeepSpeed reads the world's size from here while there is no process group.
    monkeypatch.setenv("WORLD_SIZE", str(world))
    read = DeepSpeedConfig(content)
    assert read.train_micro_batch_size_per_gpu == content["train_micro_batch_size_per_gpu"]
    assert read.zero_optimization_stage == content["zero_optimization"]["stage"]
    assert read._param_dict["expert_tensor_parallel"] == content["expert_tensor_parallel"]
