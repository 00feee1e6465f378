"""What is refused through `deepspeed.initialize`: on every rank alike, before a process group is made.

And what isn't ours to touch: a config without the block. And ranks that fail: they take their case down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import ds_etp
from ds_etp.experts.sharded import ShardedExperts
from tests.launcher import CaseFailed, Launcher
from tests.models import make_batch, make_model
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config, make_engine

RECIPE = Recipe()
_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "jetmoe": ("JetMoeConfig", {"num_local_experts": 4, "kv_channels": 8}),
}


class OwnMpu:
    """A model-parallel unit of the user's own, as Megatron passes one."""

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> None:
        return None

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD


@dataclass(frozen=True)
class Case:
    """A setting that must be refused.

    Attributes:
        says: what the message holds, in order.
        family: a family of tests.models, or of OTHER_MODELS.
        changes: to the model's config.
        block: entries merged over the config block.
        host: entries merged over the rest of the config, one level deep.
        kind: the error's class.
    """

    says: tuple[str, ...]
    family: str = "mixtral"
    changes: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    mpu: bool = False
    kind: str = "ConfigError"


TP2 = {"tensor_parallel": {"autotp_size": 2}}
# On four ranks.
CASES: dict[str, Case] = {
    "etp does not tile": Case(
        ("expert_tensor_parallel.etp_size=3 does not tile the ranks: etp 3 x ep 1", "does not divide world size 4"),
        block={"etp_size": 3},
    ),
    "etp x ep does not tile": Case(("etp 4 x ep 2 x pp 1 = 8 does not divide",), block={"etp_size": 4, "ep_size": 2}),
    "auto does not tile with ep": Case(
        ("expert_tensor_parallel.ep_size=4", "etp 2 (auto: = tp) x ep 4"),
        block={"etp_size": "auto", "ep_size": 4},
        host=TP2,
    ),
    "experts by ep": Case(
        ("expert_tensor_parallel.ep_size=4 cannot shard model.layers.0.mlp.experts: number of experts 6",),
        changes={"num_local_experts": 6},
        block={"etp_size": 1, "ep_size": 4},
    ),
    "columns by etp": Case(
        (
            "expert_tensor_parallel.etp_size=4 cannot shard model.layers.0.mlp.experts: intermediate size 18 is not "
            "divisible by 4",
            "Sizes that work with world_size=4, ep_size=1: 1, 2",
        ),
        changes={"intermediate_size": 18},
        block={"etp_size": 4},
    ),
    "columns by etp, with tp": Case(
        ("cannot shard model.layers.0.mlp.experts: intermediate size 18",),
        changes={"intermediate_size": 18},
        block={"etp_size": 4},
        host=TP2,
    ),
    "a misspelt key": Case(
        ("expert_tensor_parallel.etp_sise=2 is not a key of this block: did you mean 'etp_size'?",),
        block={"etp_sise": 2},
    ),
    "a misspelt block": Case(
        ("expert_tensor_paralel=", "did you mean 'expert_tensor_parallel'?"),
        host={"expert_tensor_paralel": {"etp_size": 2}},
    ),
    "stock expert parallelism": Case(
        ("expert_parallel.enabled=True cannot be combined with expert_tensor_parallel", "Move expert_parallel."),
        host={"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
    "hpZ": Case(
        ("zero_optimization.zero_hpz_partition_size=2 is not supported",),
        host={"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    ),
    "round robin gradients": Case(
        ("zero_optimization.round_robin_gradients=True makes DeepSpeed", "See: ds-etp check"),
        host={"zero_optimization": {"round_robin_gradients": True}},
    ),
    "an optimizer that looks at whole tensors": Case(
        ("optimizer.type='Lamb' is not known to update each entry", "Values that work: AdamW, Adam"),
        host={"optimizer": {"type": "Lamb"}},
    ),
    "a dispatcher that does not fit": Case(
        ("expert_tensor_parallel.dispatcher='replicated' needs expert ranks to hold the same tokens",),
        block={"etp_size": 2, "dispatcher": "replicated"},
    ),
    "a dense model": Case(
        ("expert_tensor_parallel.enabled=True found no routed experts in LlamaForCausalLM",), family="llama"
    ),
    "a dense model, with tp": Case(("found no routed experts in LlamaForCausalLM",), family="llama", host=TP2),
    "unsupported experts": Case(
        ("cannot split model.layers.0.", "(JetMoeParallelExperts): it is one projection of experts"),
        family="jetmoe",
        kind="UnsupportedExperts",
    ),
    "unsupported experts, with tp": Case(
        ("cannot split model.layers.0.", "(JetMoeParallelExperts)"),
        family="jetmoe",
        host=TP2,
        kind="UnsupportedExperts",
    ),
    "an mpu": Case(("mpu='OwnMpu' is an mpu of its own", "tensor_parallel.autotp_size"), mpu=True),
}


# In the workers


@dataclass(frozen=True)
class Refusal:
    """What one rank saw of one refused case."""

    kind: str
    text: str
    new_groups: int
    unchanged: bool


def build(family: str, changes: dict[str, Any]) -> Any:
    """A small model of a family that works, or of one that doesn't."""
    if family not in OTHER_MODELS:
        return make_model(family, **changes)
    name, special = OTHER_MODELS[family]
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**_TINY, **special, **changes))


def count_groups() -> int:
    """How many process groups this rank knows."""
    return len(dist.distributed_c10d._world.pg_map)


def state(model: Any) -> tuple[dict[str, Any], ...]:
    """What a half-done split would have changed."""
    parameters = {name: (id(p), p.data_ptr(), p.shape, sorted(vars(p))) for name, p in model.named_parameters()}
    hooks = {path: len(module._forward_pre_hooks) for path, module in model.named_modules()}
    return parameters, hooks, {path: type(module) for path, module in model.named_modules()}


def refused(case: Case) -> Refusal:
    """Initializes one case."""
    config = ds_config(RECIPE, Layout(4, etp=2))
    config["expert_tensor_parallel"] |= case.block
    for key, value in case.host.items():
        config[key] = {**config.get(key, {}), **value}
    model = build(case.family, case.changes)
    before, groups = state(model), count_groups()
    try:
        deepspeed.initialize(
            model=model, config=config, model_parameters=list(model.parameters()), mpu=OwnMpu() if case.mpu else None
        )
    except Exception as error:
        return Refusal(type(error).__name__, str(error), count_groups() - groups, state(model) == before)
    return Refusal("none", "", count_groups() - groups, state(model) == before)


def all_refused(cases: dict[str, Case]) -> dict[str, Refusal]:
    """One case after another: they leave nothing behind, so one run does for all."""
    ds_etp.register()
    return {name: refused(case) for name, case in cases.items()}


def left_alone(changes: dict[str, Any] | None) -> dict[str, Any]:
    """Trains a step with ds_etp registered and no block, or with `changes` to the block that turn it off."""
    ds_etp.register()
    config = ds_config(RECIPE, Layout(2, tp=1, stage=1))
    block = config.pop("expert_tensor_parallel")
    if changes is not None:
        config["expert_tensor_parallel"] = block | changes
    model = make_model("mixtral")
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    loss = engine(**make_batch(0, dist.get_rank())).loss
    engine.backward(loss)
    engine.step()
    experts = engine.module.model.layers[0].mlp.experts
    found = {
        "extension": "ds_etp" in vars(engine),
        "class": type(experts).__name__,
        "sharded": any(isinstance(module, ShardedExperts) for module in engine.module.modules()),
        "shape": tuple(experts.down_proj.shape),
        "moe": engine.has_moe_layers,
        "own": [name for name in ("destroy", "save_checkpoint", "_configure_optimizer") if name in vars(engine)],
        "tags": sorted(name for name in vars(experts.down_proj) if name in ("allreduce", "group_name")),
        "generate": "generate" in vars(engine.module),
        "table": list(deepspeed.utils.groups._EXPERT_PARALLEL_GROUP),
    }
    engine.destroy()
    return found


def step_with_different_data() -> str:
    """Each tensor-parallel peer brings its own batch."""
    engine = make_engine(RECIPE, Layout(2, tp=2, etp=2))
    with pytest.raises(AssertionError) as info:
        engine(**make_batch(0, dist.get_rank()))
    engine.destroy()
    return str(info.value)


def fail_on_one_rank() -> None:
    """Rank 1 fails between two steps, while rank 0 waits for its tokens."""
    engine = make_engine(RECIPE, Layout(2, etp=2))
    for step in range(2):
        if step == 1 and dist.get_rank() == 1:
            raise RuntimeError("rank 1 lost its data set")
        loss = engine(**make_batch(step, dist.get_rank())).loss
        engine.backward(loss)
        engine.step()


# In pytest


@pytest.fixture(scope="module")
def refusals(launcher: Launcher) -> list[dict[str, Refusal]]:
    """Every case on four ranks."""
    return launcher.run(4, all_refused, cases=CASES)


@pytest.mark.parametrize("name", CASES)
def test_refused_on_every_rank(refusals: list[dict[str, Refusal]], name: str) -> None:
    case, seen = CASES[name], [by_name[name] for by_name in refusals]
    assert {refusal.kind for refusal in seen} == {case.kind}, seen[0].text
    assert len({refusal.text for refusal in seen}) == 1, "ranks differ"
    place = 0
    for part in case.says:
        place = seen[0].text.find(part, place)
        assert place >= 0, f"{part!r} is missing in {seen[0].text!r}"
    assert [refusal.new_groups for refusal in seen] == [0] * 4, "process groups were made before the refusal"
    assert all(refusal.unchanged for refusal in seen), "the model was changed before the refusal"


@pytest.mark.parametrize("changes", [None, {"enabled": False}], ids=["no block", "not enabled"])
def test_a_config_without_the_block_is_left_alone(launcher: Launcher, changes: dict[str, Any] | None) -> None:
    for found in launcher.run(2, left_alone, changes=changes):
        assert found == {
            "extension": False,
            "class": "MixtralExperts",
            "sharded": False,
            "shape": (4, 32, 16),
            "moe": False,
            "own": [],
            "tags": [],
            "generate": False,
            "table": [],
        }


def test_different_data_on_tensor_parallel_peers(launcher: Launcher) -> None:
    for text in launcher.run(2, step_with_different_data):
        assert text.startswith("Data inconsistency within the TP group.")


def failure(launcher: Launcher, world: int, function: Callable[[], Any], timeout: float) -> tuple[str, float]:
    """The report on a case that fails, and the seconds it took."""
    start = time.monotonic()
    with pytest.raises(CaseFailed) as info:
        launcher.run(world, function, timeout=timeout)
    return str(info.value), time.monotonic() - start


def test_a_rank_that_raises_takes_the_others_down(launcher: Launcher) -> None:
    text, seconds = failure(launcher, 2, fail_on_one_rank, timeout=100)
    assert "--- rank 1 failed ---" in text
    assert "RuntimeError: rank 1 lost its data set" in text
    assert "--- rank 0" in text  # hung in a collective, or told so by gloo: ended either way
    assert seconds < 100, "the others were waited for until the time limit"
