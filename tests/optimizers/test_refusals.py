"""Which optimizers may step split experts: those that do the same to a part of a tensor as to the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer

import ds_etp
from ds_etp.cli.main import main
from ds_etp.config.optimizers import CONFIG_NAMES, ELEMENTWISE, is_elementwise
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")


def _steps(kind: Any, start: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([parameter], lr=0.1)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("name", sorted(ELEMENTWISE["torch"]))
def test_torch_optimizers_of_the_list_go_entry_by_entry(name: str) -> None:
    """Columns of the whole tensor after three steps, and what steps of those columns alone give: bit by bit."""
    torch.manual_seed(0)
    kind = getattr(torch.optim, name)
    start, *grads = (torch.randn(4, 6) for _ in range(4))
    whole = _steps(kind, start, grads)
    part = _steps(kind, start[:, 1:4], [grad[:, 1:4] for grad in grads])
    assert torch.equal(whole[:, 1:4], part) and not torch.equal(whole, start)
    assert is_elementwise(kind([torch.nn.Parameter(start)], lr=0.1))
    assert name.lower() in CONFIG_NAMES


def test_torch_optimizers_off_the_list() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    for name in NOT_ELEMENTWISE:
        if hasattr(torch.optim, name):
            assert not is_elementwise(getattr(torch.optim, name)(weights)), name


def _named(module: str, name: str, **attributes: Any) -> Any:
    """An optimizer of a package that need not be here: what is looked at is its class."""
    kind = type(name, (torch.optim.SGD,), {"__module__": module, "step": lambda self: None, **attributes})
    return kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def _accelerated(optimizer: Any) -> AcceleratedOptimizer:
    """Wrapped as Accelerate does, without the state of an Accelerator, which is the whole process's."""
    wrapper = object.__new__(AcceleratedOptimizer)
    wrapper.optimizer = optimizer
    return wrapper


def test_by_package_name_and_options() -> None:
    """A name counts with its package; a subclass counts as what it inherits its step from; a wrapper as what it has."""
    assert is_elementwise(_named("apex.optimizers.fused_adam", "FusedAdam"))
    assert is_elementwise(_named("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"))
    assert not is_elementwise(_named("galore_torch.adamw", "AdamW"))
    assert not is_elementwise(_named("apex.optimizers.fused_lamb", "FusedLAMB"))
    assert not is_elementwise(_named("muon", "MuonWithAuxAdam"))
    eight = "bitsandbytes.optim.adamw"
    assert is_elementwise(_named(eight, "AdamW8bit"))
    assert not is_elementwise(_named(eight, "AdamW8bit", args=SimpleNamespace(percentile_clipping=5)))
    assert not is_elementwise(_named(eight, "AdamW8bit", args=SimpleNamespace(block_wise=False)))
    assert not is_elementwise(_named("bitsandbytes.optim.lamb", "LAMB8bit"))
    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    inherited = type("Mine", (torch.optim.AdamW,), {})
    own = type("Mine", (torch.optim.AdamW,), {"step": lambda self: None})
    assert is_elementwise(inherited(weights)) and not is_elementwise(own(weights))
    adamw = torch.optim.AdamW(weights)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1.0)  # wraps its step
    assert is_elementwise(_accelerated(adamw))
    assert not is_elementwise(_accelerated(torch.optim.Adafactor(weights)))


def refusal(how: str, name: str, block: dict[str, Any]) -> tuple[str, int]:
    """What `initialize` says, and how many process groups it made before."""
    ds_etp.register()
    recipe = Recipe()
    model = recipe.model()
    config = ds_config(recipe, Layout(world=2))
    config["expert_tensor_parallel"] = block
    arguments: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if how == "config":
        config["optimizer"] = {"type": name, "params": {"lr": 0.1}}
    else:
        del config["optimizer"]
        kind = getattr(torch.optim, name)
        arguments["optimizer"] = kind if how == "callable" else kind(arguments.pop("model_parameters"))
    before = len(dist.distributed_c10d._world.pg_map)
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    except ds_etp.ConfigError as error:
        return str(error), len(dist.distributed_c10d._world.pg_map) - before
    engine.destroy()
    return "", 0


@pytest.mark.parametrize(
    ("how", "name"),
    [("config", "Lamb"), ("object", "Adafactor"), ("callable", "Adafactor")],
)
@pytest.mark.parametrize("split", ["etp_size", "ep_size"])
def test_an_optimizer_that_needs_whole_tensors_is_refused(launcher: Launcher, how: str, name: str, split: str) -> None:
    """On all ranks alike, with the key for those who know better; before a group is made, where it is known then."""
    said = launcher.run(2, refusal, how=how, name=name, block={split: 2})
    assert said[0] == said[1]
    message, groups = said[0]
    shown = name if how == "config" else f"torch.optim.{name}"
    assert message.startswith(f"optimizer{'.type' * (how == 'config')}={shown!r} is not known to update each entry")
    assert message.endswith('set "allow_optimizer": true in expert_tensor_parallel.')
    assert groups == 0 or how == "callable"


@pytest.mark.parametrize("block", [{"etp_size": 2, "allow_optimizer": True}, {"etp_size": 1}], ids=str)
def test_it_passes_on_the_users_word_and_where_experts_are_whole(launcher: Launcher, block: dict[str, Any]) -> None:
    for how in ("object", "callable"):
        said = launcher.run(2, refusal, how=how, name="Adafactor", block=block)
        assert said == [("", 0)] * 2


def test_the_check_command_refuses_it_too(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"optimizer": {"type": "Lamb"}, "expert_tensor_parallel": {"etp_size": 2}}')
    assert main(["check", str(file), "--gpus", "2"]) == 2
    assert capsys.readouterr().err.startswith("optimizer.type='Lamb' is not known")


def uneven(optimizer: str) -> str:
    """What `initialize` says of three key-value heads on two ranks."""
    ds_etp.register()
    recipe = Recipe(changes=(("num_attention_heads", 3), ("num_key_value_heads", 3), ("head_dim", 8)))
    config = ds_config(recipe, Layout(world=2, tp=2, etp=2))
    if optimizer == "Muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}}
    model = recipe.model()
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    except ds_etp.ConfigError as error:
        return str(error)
    engine.destroy()
    return ""


def test_muon_and_layers_that_autotp_splits_unevenly(launcher: Launcher) -> None:
    """Two heads here and one there: refused on both ranks, with Muon alone."""
    said = launcher.run(2, uneven, optimizer="Muon")
    assert said[0] == said[1]
    assert said[0].startswith("tensor_parallel.autotp_size=2 does not work with the Muon optimizer here")
    assert "(at model.layers.0.self_attn.q_proj.weight)" in said[0]
    assert launcher.run(2, uneven, optimizer="SGD") == ["", ""]
