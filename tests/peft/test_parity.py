"""LoRA on split models equals LoRA on the unsharded model: losses, norms, adapters' gradients, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_etp.errors import ConfigError
from tests.launcher import Launcher
from tests.models import make_batch
from tests.oracle import Run, train_unsharded
from tests.parity.test_bf16 import EVERY_EXPERT, FACTOR, errors
from tests.peft.models import (
    ATTENTION,
    BOTH,
    DOWN,
    EXPERTS,
    GATE_UP,
    ONLY_ATTENTION,
    ONLY_DOWN,
    LoraRecipe,
    SeedsByRank,
)
from tests.sharded import Layout, make_engine, run_steps, train, with_options
from tests.tolerances import assert_equal_runs

# Which (tp, etp, ep) each ZeRO stage is run with, on four ranks.
SPLITS = {
    0: [(1, 2, 2), (2, 4, 1)],
    1: [(1, 2, 1), (2, 2, 2)],
    2: [(2, 2, 1), (4, 1, 2)],
    3: [(1, 2, 1), (2, 4, 1), (2, 1, 2), (4, 2, 1)],
}
PROMPT = make_batch(99, 0)["input_ids"]


def check(launcher: Launcher, recipe: LoraRecipe, layout: Layout) -> None:
    """Trains sharded and unsharded, and compares everything."""
    recipe = replace(recipe, dp=layout.dp, steps=3)
    run = launcher.run(layout.world, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


@pytest.mark.compat  # releases of PEFT multiply experts' adapters in different places
@pytest.mark.sample("1-(2, 2, 2)", "3-(4, 2, 1)")
@pytest.mark.parametrize(
    ("stage", "split"), [(stage, split) for stage, splits in SPLITS.items() for split in splits], ids=str
)
def test_experts_and_attention(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """Adapters on both, over stages and layouts; the tensor-parallel ones have attention's adapters split too."""
    tp, etp, ep = split
    check(launcher, BOTH, Layout(4, tp, etp, ep, stage))


@pytest.mark.sample(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_fill_their_adapters_apart(launcher: Launcher, stage: int) -> None:
    """Rank 0's count, with tensor parallelism as without. AutoTP cuts the ones of attention."""
    recipe = SeedsByRank(modules=ATTENTION)
    check(launcher, recipe, Layout(4, 2, 2, 1, stage))


@pytest.mark.compat
@pytest.mark.sample("down-3")
@pytest.mark.parametrize(
    ("stage", "recipe", "split"),
    [
        (3, EXPERTS, (1, 2, 2)),
        (3, ONLY_DOWN, (2, 2, 1)),
        (0, ONLY_DOWN, (1, 1, 4)),
        (2, ONLY_ATTENTION, (2, 2, 1)),
    ],
    ids=["experts-3", "down-3", "down-0", "attention-2"],
)
def test_some_of_them(launcher: Launcher, stage: int, recipe: LoraRecipe, split: tuple[int, int, int]) -> None:
    """Adapters on a part of the model."""
    tp, etp, ep = split
    check(launcher, recipe, Layout(4, tp, etp, ep, stage))


@pytest.mark.sample(2, 4, 7, 11, 14)
@pytest.mark.parametrize(
    ("stage", "changes", "layout"),
    [
        (2, {"optimizer": "adamw", "parameters": (GATE_UP, "mlp.gate.weight")}, {"tp": 2, "etp": 2}),
        (3, {"family": "olmoe", "modules": (), "parameters": (DOWN, "mlp.gate.weight")}, {"etp": 2, "ep": 2}),
        (3, {"optimizer": "adamw"}, {"tp": 2, "etp": 2, "zero_init": True}),
        (1, {"family": "qwen3_moe", "implementation": "grouped_mm"}, {"tp": 2, "etp": 2, "ep": 2}),
        (1, {"accumulate": 2, "lengths": (12, 5, 9, 3), "checkpointing": "reentrant"}, {"etp": 2, "ep": 2}),
        (3, {"checkpointing": "plain"}, {"tp": 2, "etp": 4}),
        (1, {"second": True}, {"tp": 2, "etp": 4}),
        (3, {"pinned": (0, 1)}, {"ep": 4}),  # two of four ranks get no token
        (0, {"rows": 1, "lengths": (1,), "loss": "logits"}, {"tp": 4, "etp": 2}),
        (1, {}, {"tp": 2, "etp": 2, "dispatcher": "alltoall"}),
        (2, {"modules": (*ATTENTION, "shared_expert.down_proj"), "family": "qwen2_moe"}, {"tp": 2, "etp": 2}),
        (2, {"options": (("use_rslora", True), ("rank_pattern", (("gate_up_proj", 2),)))}, {"etp": 2, "ep": 2}),
        (1, {"options": (("modules_to_save", ("mlp.experts",)),), "parameters": ()}, {"tp": 2, "etp": 2, "ep": 2}),
        (3, {"options": (("modules_to_save", ("gate",)),)}, {"tp": 2, "etp": 2}),
        (1, {"family": "gpt_oss", "modules": ()}, {"etp": 2, "ep": 2}),  # transposed, gate and up interleaved
        (2, {"family": "longcat_flash", "modules": ()}, {"etp": 2, "ep": 2}),  # rows of experts without weights
    ],
    ids=str,
)
def test_settings(launcher: Launcher, stage: int, changes: dict[str, Any], layout: dict[str, Any]) -> None:
    """What people train with, on adapters of both kinds."""
    check(launcher, replace(BOTH, **changes), Layout(4, stage=stage, **layout))


@pytest.mark.parametrize(
    ("stage", "changes", "layout"),
    [
        (0, {}, {"tp": 2, "etp": 2, "dispatcher": "replicated"}),
        (0, {"train_base": True, "second": True}, {"etp": 2}),
        (2, {"checkpointing": "plain"}, {"tp": 2, "etp": 2}),
        (2, {"train_base": True, "family": "qwen3_moe", "implementation": "grouped_mm"}, {"ep": 2}),
        (3, {"accumulate": 2}, {"etp": 2}),
        (3, {"train_base": True}, {"tp": 2, "ep": 2, "dispatcher": "alltoall"}),
    ],
    ids=str,
)
def test_recompute(launcher: Launcher, stage: int, changes: dict[str, Any], layout: dict[str, Any]) -> None:
    """Experts that run again in backward do so with the adapters that forward had, base frozen or not."""
    check(launcher, replace(BOTH, **changes), with_options(Layout(2, stage=stage, **layout), recompute=True))


def test_no_gradient_goes_in(launcher: Launcher) -> None:
    """The first block of experts gets an input without gradient, at which plain ZeRO-3 reduces too early."""
    check(launcher, replace(EXPERTS, input_grads=False), Layout(4, 2, 2, 1, 3))


def with_dropout(recipe: LoraRecipe, layout: Layout, *, by_rank: bool) -> str:
    """Trains with dropout, from one random state on all ranks or from another on each."""
    engine = make_engine(recipe, layout)
    torch.manual_seed(dist.get_rank() if by_rank else 3)
    try:
        run_steps(engine, recipe, layout)  # asserts that replicas stay bit-identical
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()


@pytest.mark.parametrize("by_rank", [False, True])
def test_dropout_under_tensor_parallelism(launcher: Launcher, by_rank: bool) -> None:
    """Tensor-parallel peers hold A whole, so they have to drop the same of its input; otherwise the run stops."""
    recipe = replace(ONLY_ATTENTION, options=(("lora_dropout", 0.3),), dp=1, steps=2)
    for text in launcher.run(2, with_dropout, recipe=recipe, layout=Layout(2, tp=2, etp=2), by_rank=by_rank):
        assert ("leaves the ranks of a tensor-parallel group with different gradients" in text) == by_rank, text


def adapters_of(run: Run) -> Run:
    """A run without what is frozen, whose gradients are nothing to measure an error by."""
    grads, weights = ({n: t for n, t in found.items() if "lora_" in n} for found in (run.grads, run.weights))
    return replace(run, grads=grads, weights=weights)


@pytest.mark.sample("3-(1, 2, 2)")
@pytest.mark.parametrize(("stage", "split"), [(2, (2, 4, 1)), (3, (1, 2, 2))], ids=str)
def test_bf16(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """As close to the fp32 truth as plain DeepSpeed with the same adapters is."""
    tp, etp, ep = split
    layout = Layout(4, tp, etp, ep, stage, dtype="bf16")
    recipe = replace(BOTH, dp=layout.dp, steps=3, changes=EVERY_EXPERT)
    truth = adapters_of(train_unsharded(recipe))
    plain = Layout(layout.dp, stage=stage, dtype="bf16", with_block=False)
    got = errors(adapters_of(launcher.run(4, train, recipe=recipe, layout=layout)[0]), truth)
    allowed = errors(adapters_of(launcher.run(plain.world, train, recipe=recipe, layout=plain)[0]), truth)
    for kind, error in got.items():
        limit = FACTOR * max(allowed[kind], 2**-8 if kind in ("loss", "norm") else 0.0)
        assert error <= limit, f"{kind} is off by {error:.1e}; plain bf16 by {allowed[kind]:.1e}"


def generate(recipe: LoraRecipe, layout: Layout) -> torch.Tensor:
    """Generates before anything else."""
    engine = make_engine(recipe, layout)
    engine.module.eval()
    tokens: torch.Tensor = engine.module.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False)
    engine.destroy()
    return tokens


def test_generate(launcher: Launcher) -> None:
    """At ZeRO-3 in a family that DeepSpeed doesn't gather by blocks, where adapters are read outside a forward."""
    recipe = replace(EXPERTS, family="olmoe")
    wanted = recipe.model().eval().generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False)
    for tokens in launcher.run(2, generate, recipe=recipe, layout=Layout(2, etp=2, stage=3)):
        assert torch.equal(tokens, wanted)
