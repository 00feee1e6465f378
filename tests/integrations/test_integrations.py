"""Frameworks that start the script themselves: experts are split, numbers are Trainer's alone, and saves are whole.

Axolotl isn't installed here; its hooks are called as its release 0.19.0 calls them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from safetensors.torch import load_file

from ds_etp.errors import ConfigError
from tests.export.test_live import assert_same_bits, load
from tests.integrations.hosts import (
    JOB,
    as_axolotl,
    as_ms_swift,
    axolotl_plugin,
    with_callback,
    with_callback_undone,
)
from tests.launcher import Launcher
from tests.sharded import Layout
from tests.trainer.runs import Outcome, forget_host_state, run_plain
from tests.trainer.test_trainer import assert_equal

BLOCK = {"expert_tensor_parallel": {}}


@cache
def plain() -> Outcome:
    """Trainer alone."""
    try:
        return run_plain(JOB, Path(mkdtemp(prefix="ds_etp-plain-")))
    finally:
        forget_host_state()


@pytest.mark.parametrize("start", [as_ms_swift, with_callback], ids=["ms-swift", "callback"])
def test_numbers_are_those_of_trainer_alone(launcher: Launcher, tmp_path: Path, start: Callable[..., Outcome]) -> None:
    got = launcher.run(2, start, layout=Layout(2, etp=2, stage=1), folder=tmp_path)[0]
    assert_equal(got, plain(), evaluations=False)


@pytest.mark.parametrize("layout", [Layout(2, tp=2, etp=2, stage=1), Layout(2, ep=2, stage=3)], ids=["1", "3"])
def test_axolotl_saves_on_all_ranks(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    got = launcher.run(2, as_axolotl, layout=layout, folder=tmp_path)[0]
    assert_equal(got, plain(), evaluations=False)
    assert_same_bits(load(tmp_path / "out"), got.weights)


def test_axolotl_saves_adapters(launcher: Launcher, tmp_path: Path) -> None:
    layout = Layout(2, tp=2, etp=2, stage=2)
    got = launcher.run(2, as_axolotl, layout=layout, folder=tmp_path, adapters=True)[0]
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    trained = {name.replace(".default", ""): value for name, value in got.weights.items() if "lora_" in name}
    assert set(saved) == set(trained) and saved
    assert all((saved[name] == value).all() for name, value in trained.items())


def test_a_callback_that_is_undone(launcher: Launcher, tmp_path: Path) -> None:
    for said in launcher.run(2, with_callback_undone, layout=Layout(2, etp=2, stage=1), folder=tmp_path):
        assert said.startswith("expert_tensor_parallel is in the DeepSpeed config, but the experts are not split"), said


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        ({"deepspeed": None}, "deepspeed=None is not set"),
        ({"deepspeed": {}}, "deepspeed={} is not set"),
        ({"deepspeed": {"bf16": {}}}, "has no expert_tensor_parallel block: nothing would be split"),
        ({"expert_parallel_size": 2}, "expert_parallel_size=2 is Axolotl's own expert parallelism"),
        ({"use_scattermoe": True}, "use_scattermoe=True takes experts kernels of Axolotl's own"),
        ({"use_sonicmoe": True}, "use_sonicmoe=True takes experts kernels"),
        ({"expert_backend": "sonicmoe"}, "expert_backend='sonicmoe' takes experts kernels"),
        ({"experts_implementation": "deep_ep_grouped_mm"}, "experts_implementation='deep_ep_grouped_mm' takes"),
        ({"quantize_moe_experts": True}, "quantize_moe_experts=True packs the experts' weights"),
        ({"plugins": ["axolotl.integrations.densemixer.DenseMixerPlugin"]}, "has densemixer"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 splits attention by transformers"),
        ({"context_parallel_size": 2}, "context_parallel_size=2 shares sequences by ring attention"),
        ({"fsdp_config": {"offload_params": True}}, "can't be combined with DeepSpeed"),
    ],
    ids=str,
)
def test_axolotl_is_refused_by_name(cfg: dict[str, Any], said: str) -> None:
    plugin = axolotl_plugin()()
    for hook in (plugin.register, plugin.pre_model_load):
        with pytest.raises(ConfigError) as info:
            hook({"deepspeed": BLOCK, **cfg})
        assert said in str(info.value) and "work" in str(info.value)


def test_axolotl_is_not_refused() -> None:
    axolotl_plugin()().register(
        {
            "deepspeed": BLOCK,
            "expert_parallel_size": 1,
            "expert_backend": "eager",
            "experts_implementation": "grouped_mm",
        }
    )
    axolotl_plugin()().register({"deepspeed": {"expert_tensor_parallel": {"enabled": False}}, "use_scattermoe": True})


def test_the_hooks_are_those_of_axolotls_base_class() -> None:
    plugin = axolotl_plugin()
    hooks = {"register": "cfg", "pre_model_load": "cfg", "add_callbacks_post_trainer": "cfg trainer"}
    assert hooks.keys() == {name for name in vars(plugin) if not name.startswith("_")}
    base = plugin.__mro__[1]
    for name, names in hooks.items():
        for owner in (plugin,) if hasattr(base, "stands_in") else (plugin, base):
            assert list(inspect.signature(vars(owner)[name]).parameters) == ["self", *names.split()], owner
