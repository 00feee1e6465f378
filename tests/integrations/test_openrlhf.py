"""OpenRLHF's strategy with the block added by two lines: its engines, losses, checkpoints, saves and weight syncs.

OpenRLHF can't be installed without CUDA as a whole; its own code is enough: pip install --no-deps openrlhf, and
torchdata, sympy, pylatexenc.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_etp.errors import ConfigError
from ds_etp.integrations.openrlhf import add_block
from tests.export.test_live import assert_same_bits, load
from tests.launcher import Launcher
from tests.oracle import Run
from tests.sharded import Layout
from tests.tolerances import LOSS, NORM, TENSOR

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("openrlhf is not among the requirements: see above", allow_module_level=True)

from tests.integrations.openrlhf_runs import dense_config, resume, save_start, sync, train

LIMIT = 240
# The layout that trains, and the one that goes on from its checkpoint.
CASES = [
    (Layout(2, etp=2, stage=3), Layout(2, ep=2, stage=2)),
    (Layout(2, ep=2, stage=3), Layout(2, etp=2, stage=3)),
    (Layout(2, etp=2, stage=2), Layout(2, ep=2, stage=3)),
    (Layout(4, tp=2, etp=2, stage=1), Layout(2, etp=2, stage=1)),
]


@cache
def start() -> str:
    """The folder of the model that every training starts from."""
    folder = Path(mkdtemp(prefix="ds_etp-openrlhf-"))
    save_start(folder)
    return str(folder)


@cache
def plain(launcher: Launcher) -> Run:
    """OpenRLHF's strategy alone, over two data-parallel ranks."""
    run: Run = launcher.run(
        2, train, timeout=LIMIT, layout=Layout(2, stage=1, with_block=False), start=start(), folder=""
    )[0]
    return run


def named(layout: Layout) -> str:
    return f"w{layout.world}-tp{layout.tp}-etp{layout.etp}-ep{layout.ep}-zero{layout.stage}"


def assert_equal(got: Run, wanted: Run, steps: int = 3) -> None:
    """The last steps, and all weights."""
    assert got.losses == pytest.approx(wanted.losses[-steps:], rel=LOSS)
    assert got.norms == pytest.approx(wanted.norms[-steps:], rel=NORM)
    assert set(got.weights) == set(wanted.weights)
    for name, reference in wanted.weights.items():
        error = ((got.weights[name] - reference).abs().max() / reference.abs().max()).item()
        assert error <= TENSOR, f"{name} is off by {error:.1e} of its largest entry"


@pytest.mark.parametrize(("layout", "other"), CASES, ids=named)
def test_training_resuming_and_saving(launcher: Launcher, tmp_path: Path, layout: Layout, other: Layout) -> None:
    wanted = plain(launcher)
    got = launcher.run(layout.world, train, timeout=LIMIT, layout=layout, start=start(), folder=str(tmp_path))[0]
    assert len(got.losses) == 3 and any(got.norms)
    assert_equal(got, wanted)
    assert_same_bits(load(tmp_path / "model"), got.weights)
    went_on = launcher.run(other.world, resume, timeout=LIMIT, layout=other, start=start(), folder=str(tmp_path))[0]
    assert_equal(went_on, wanted, steps=1)


@pytest.mark.parametrize("layout", [Layout(2, etp=2, stage=3), Layout(2, ep=2, stage=3)], ids=named)
def test_vllm_gets_whole_weights(launcher: Launcher, layout: Layout) -> None:
    """Announced and sent in the whole model's shapes, and the same bits."""
    announced, sent, said = launcher.run(2, sync, timeout=LIMIT, layout=layout, start=start())[0]
    model = AutoModelForCausalLM.from_pretrained(start())
    assert said == ""
    assert announced == [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert all(torch.equal(sent[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(2, etp=2, stage=2), "ds.zero_stage=2 sends vLLM the parameters that rank 0 holds, shards"),
        (Layout(2, tp=2, etp=2, stage=1), "ds.tensor_parallel_size=2 sends vLLM"),
    ],
    ids=["ZeRO-2", "AutoTP"],
)
def test_vllm_never_gets_shards(launcher: Launcher, layout: Layout, message: str) -> None:
    for announced, sent, said in launcher.run(2, sync, timeout=LIMIT, layout=layout, start=start()):
        assert said.startswith(message) and not announced and not sent


def test_models_without_experts_get_no_block(launcher: Launcher) -> None:
    assert launcher.run(2, dense_config, timeout=LIMIT, layout=Layout(2, etp=2)) == [False, False]


def test_a_file_without_the_block(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    with pytest.raises(ConfigError, match="has no expert_tensor_parallel block"):
        add_block(tmp_path / "ds.json")
    with pytest.raises(ConfigError, match="etp_sise"):
        add_block({"etp_sise": 2})
