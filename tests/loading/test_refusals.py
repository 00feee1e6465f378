"""What `ds_etp.from_pretrained` refuses, on every rank alike, and what it leaves to the engine."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import ds_etp
from ds_etp.errors import CheckpointError, ConfigError
from ds_etp.loading.nodes import FileTensor
from tests.launcher import Launcher
from tests.loading.test_weights import engine_of, plainly
from tests.models import make_batch
from tests.oracle import Recipe
from tests.sequence.runs import Sequences, ulysses
from tests.sharded import Layout, ds_config, full_tensors, weight

PAIR = Layout(world=2, etp=2)
FILE = "model.safetensors"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Recipe().model().save_pretrained(tmp_path)
    return tmp_path


def refusal(folders: list[str], config: dict[str, Any], **arguments: Any) -> tuple[str, str]:
    """Kind and message of what is raised."""
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        ds_etp.from_pretrained(folders[dist.get_rank()], config, **arguments)
    return type(raised.value).__name__, str(raised.value)


def _without_an_expert(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors[EXPERT.replace("w1", "w2")]
    save_file(tensors, folder / FILE, {"format": "pt"})


def _without_a_layers_experts(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.block_sparse_moe.experts" not in name}
    del kept["model.norm.weight"]
    save_file(kept, folder / FILE, {"format": "pt"})


def _of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    for name in list(tensors):
        if "layers.1.block_sparse_moe.experts" in name:
            tensors[name] = torch.zeros(24, 32) if "w2" not in name else torch.zeros(32, 24)
    save_file(tensors, folder / FILE, {"format": "pt"})


def _one_of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    tensors[EXPERT] = torch.zeros(24, 32)
    save_file(tensors, folder / FILE, {"format": "pt"})


def _cut_short(folder: Path) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-1000])


def _quantized(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))


def _gone(folder: Path) -> None:
    (folder / FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without_an_expert, ["model.layers.1.mlp.experts.down_proj as (3, 32, 16)", "(4, 32, 16)"]),
        (_without_a_layers_experts, ["model.layers.1.mlp.experts.down_proj, ", "model.norm.weight"]),
        (_of_another_shape, ["model.layers.1.mlp.experts.down_proj as (4, 32, 24)", "(4, 32, 16)"]),
        (_one_of_another_shape, ["model.layers.1.mlp.experts.gate_up_proj in full", "equal size"]),
        (_cut_short, [FILE]),
        (_quantized, ["quantized"]),
        (_gone, [FILE]),
    ],
)
def test_damaged_folders(launcher: Launcher, folder: Path, damage: Callable[[Path], None], says: list[str]) -> None:
    damage(folder)
    config = ds_config(Recipe(), PAIR)
    for kind, message in launcher.run(2, refusal, folders=[str(folder)] * 2, config=config):
        print(message)
        assert kind == "CheckpointError"
        assert all(word in message for word in [str(folder), *says]), message


def test_one_rank_fails(launcher: Launcher, folder: Path, tmp_path: Path) -> None:
    folders = [str(folder), str(tmp_path / "nowhere")]
    for kind, message in launcher.run(2, refusal, folders=folders, config=ds_config(Recipe(), PAIR)):
        assert kind == "CheckpointError"
        assert "rank 1" in message
        assert "nowhere" in message


def test_offline(launcher: Launcher) -> None:
    """The hub's own advice is in the message."""
    for kind, message in launcher.run(2, refusal, folders=["no/model"] * 2, config=ds_config(Recipe(), PAIR)):
        assert kind == "CheckpointError"
        assert "no/model" in message
        assert "offline" in message.lower()


def refusal_under_ulysses(folder: str, config: dict[str, Any]) -> tuple[str, str]:
    """The same where Ulysses was registered before, for another model."""
    with ulysses(Sequences().model(), Layout(world=2, sp=2), rows=1):
        return refusal([folder] * 2, config)


def test_the_sequence_size_is_known(launcher: Launcher, tmp_path: Path) -> None:
    """Ulysses told of ranks that share a sequence: the heads of the model that is loaded have to fit."""
    changes = (("num_attention_heads", 1), ("num_key_value_heads", 1), ("head_dim", 8))
    Recipe(changes=changes).model().save_pretrained(tmp_path)
    for kind, message in launcher.run(2, refusal_under_ulysses, folder=str(tmp_path), config=ds_config(Recipe(), PAIR)):
        assert kind == "ConfigError"
        assert message.startswith("sequence parallel size=2 does not split attention: the model's 1 attention heads")


def unreadable(folder: str, layout: Layout) -> str:
    """What is raised where rank 1 fails in the middle of reading."""
    config = ds_config(Recipe(), layout)
    model = ds_etp.from_pretrained(folder, config, experts_implementation="eager")
    if dist.get_rank() == 1:
        vars(model.model.layers[1].mlp.experts)["ds_etp_deferred"].nodes["down_proj"] = FileTensor(torch.zeros(3))
    with pytest.raises(CheckpointError) as raised:
        engine_of(model, config)
    return str(raised.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_fails_to_read(launcher: Launcher, folder: Path, stage: int) -> None:
    """At ZeRO-3 its peers are in collectives at that time."""
    for message in launcher.run(2, unreadable, folder=str(folder), layout=Layout(world=2, ep=2, stage=stage)):
        assert "reading experts failed on rank 1" in message


def progress_of(folder: str, progress: bool) -> str:
    """What goes to the terminal while experts are read."""
    config = ds_config(Recipe(), PAIR)
    terminal = io.StringIO()
    with contextlib.redirect_stderr(terminal):
        model = ds_etp.from_pretrained(folder, config, experts_implementation="eager", progress=progress)
        assert terminal.getvalue() == ""
        engine_of(model, config).destroy()
    return terminal.getvalue()


def test_progress_bar(launcher: Launcher, folder: Path) -> None:
    """On rank 0, counting layers."""
    first, second = launcher.run(2, progress_of, folder=str(folder), progress=True)
    assert "reading experts: 100%" in first
    assert "2/2" in first
    assert "reading experts" not in second + "".join(launcher.run(2, progress_of, folder=str(folder), progress=False))


@pytest.mark.parametrize(
    ("changes", "arguments", "says"),
    [
        ({"expert_tensor_parallel": {"etp_size": 3}}, {}, "etp_size=3 does not tile"),
        ({"expert_tensor_parallel": {"etp": 2}}, {}, "expert_tensor_parallel.etp"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, {}, "zero_hpz_partition_size=2"),
        ({}, {"device_map": "auto"}, "device_map='auto'"),
        ({}, {"dtype": "int7"}, "dtype='int7'"),
    ],
)
def test_settings(
    launcher: Launcher, folder: Path, changes: dict[str, Any], arguments: dict[str, Any], says: str
) -> None:
    config = {**ds_config(Recipe(), PAIR), **changes}
    for kind, message in launcher.run(2, refusal, folders=[str(folder)] * 2, config=config, **arguments):
        assert kind == "ConfigError"
        assert says in message


def test_sizes_that_do_not_divide(launcher: Launcher, tmp_path: Path) -> None:
    Recipe(changes=(("intermediate_size", 15),)).model().save_pretrained(tmp_path)
    for kind, message in launcher.run(2, refusal, folders=[str(tmp_path)] * 2, config=ds_config(Recipe(), PAIR)):
        assert kind == "ConfigError"
        assert "intermediate size 15 is not divisible by 2" in message


def used_too_soon(folder: str) -> list[str]:
    """What a model says before it is in an engine, and in one that can't read it."""
    config = ds_config(Recipe(), PAIR)
    model = ds_etp.from_pretrained(folder, config, experts_implementation="eager")
    without = {key: value for key, value in config.items() if key != "expert_tensor_parallel"}
    found = []
    for use in (
        lambda: model(**make_batch(0, 0)),
        model.state_dict,
        lambda: model.save_pretrained(f"{folder}/copy"),
        lambda: copy.deepcopy(model),
        lambda: engine_of(model, without),
    ):
        with pytest.raises(ConfigError) as raised:
            use()
        found.append(str(raised.value))
    return found


def test_use_before_the_engine(launcher: Launcher, folder: Path) -> None:
    *early, without = launcher.run(2, used_too_soon, folder=str(folder))[0]
    assert all("model.layers.0.mlp.experts was loaded by ds_etp.from_pretrained" in message for message in early)
    assert "is not in this engine's config" in without


def elsewhere(folder: str, given: Layout, layout: Layout) -> dict[str, torch.Tensor]:
    """The weights of an engine whose layout is another one than `from_pretrained` was given."""
    model = ds_etp.from_pretrained(folder, ds_config(Recipe(), given), experts_implementation="eager")
    engine = engine_of(model, ds_config(Recipe(), layout))
    weights = full_tensors(engine, weight)
    engine.destroy()
    return weights


def test_the_engines_layout_counts(launcher: Launcher, folder: Path) -> None:
    """Nothing was read for the other one."""
    weights = launcher.run(2, elsewhere, folder=str(folder), given=PAIR, layout=Layout(world=2, ep=2, stage=2))[0]
    for name, parameter in Recipe().model().named_parameters():
        assert torch.equal(weights[name], parameter), name


def without_block(folder: str) -> bool:
    """Whether a config without our block gives what transformers loads, from a file too."""
    config = ds_config(Recipe(), Layout(world=2, with_block=False))
    path = Path(folder) / f"ds-{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    ours, theirs = ds_etp.from_pretrained(folder, path).state_dict(), plainly(folder, config).state_dict()
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_the_block(launcher: Launcher, folder: Path) -> None:
    assert launcher.run(2, without_block, folder=str(folder)) == [True, True]
