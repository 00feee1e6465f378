"""Parity under the settings people train with: each over the ZeRO stages it touches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, train
from tests.tolerances import assert_equal_runs

STAGES = [0, 1, 2, 3]


def check(launcher: Launcher, recipe: Recipe, layout: Layout) -> None:
    """Trains sharded and unsharded, and compares everything."""
    run = launcher.run(layout.world, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


@pytest.mark.full
@pytest.mark.parametrize(("stage", "split"), [(1, (1, 2, 1)), (3, (2, 2, 1)), (1, (2, 1, 2)), (3, (4, 2, 1))], ids=str)
def test_forced_alltoall(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """The general dispatcher also where `auto` would take the replicated one."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage, dispatcher="alltoall")
    check(launcher, Recipe(dp=layout.dp), layout)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("split", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_experts_implementations(launcher: Launcher, implementation: str, split: tuple[int, int, int]) -> None:
    """The family's forward runs on the shard under the implementation the user chose."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=1)
    check(launcher, Recipe(family="qwen3_moe", dp=layout.dp, implementation=implementation), layout)


def test_shards_too_narrow_for_grouped_mm(launcher: Launcher) -> None:
    """2 of 8 columns are 8 bytes, and torch wants 16: the family's own forward gives the numbers of grouped_mm."""
    recipe = Recipe(dp=4, implementation="grouped_mm", changes=(("intermediate_size", 8),), steps=2)
    check(launcher, recipe, Layout(world=4, etp=4, stage=2))


def test_shared_experts(launcher: Launcher) -> None:
    """Shared experts (Qwen2-MoE) are AutoTP's to split, and stay out of ours."""
    check(launcher, Recipe(family="qwen2_moe", dp=2), Layout(world=4, tp=2, etp=2, ep=2, stage=2))


@pytest.mark.full
def test_family_whose_attention_autotp_refuses(launcher: Launcher) -> None:
    """AutoTP knows no `rowwise_split_input`, which OLMoE's attention asks for: experts split without tp."""
    check(launcher, Recipe(family="olmoe", dp=4), Layout(world=4, etp=2, ep=2, stage=2))


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_with_uneven_batches(launcher: Launcher, stage: int) -> None:
    """Two micro batches a step; ranks of one expert group hold sequences of different length."""
    recipe = Recipe(dp=4, accumulate=2, lengths=(12, 5, 9, 3))
    check(launcher, recipe, Layout(world=4, etp=2, ep=2, stage=stage))


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", STAGES)
def test_no_clipping(launcher: Launcher, stage: int) -> None:
    """The true norm is reported without clipping too."""
    check(launcher, Recipe(dp=2, clip=0.0, steps=2), Layout(world=4, tp=2, etp=4, stage=stage))


@pytest.mark.sample("2-sgd", "3-adamw")
@pytest.mark.parametrize(("stage", "optimizer"), [(1, "adamw"), (2, "sgd"), (3, "adamw"), (3, "sgd")])
def test_optimizer_offload(launcher: Launcher, stage: int, optimizer: str) -> None:
    """Optimizer states and master weights on the host. Stages 1 and 2, one class, share the optimizers."""
    offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    layout = Layout(world=4, tp=2, etp=2, ep=2, stage=stage, extra=(("zero_optimization", offload),))
    check(launcher, Recipe(dp=2, optimizer=optimizer), layout)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "checkpointing"), [(1, "reentrant"), (2, "plain"), (3, "reentrant"), (3, "plain")])
def test_activation_checkpointing(launcher: Launcher, stage: int, checkpointing: str) -> None:
    """Recomputation runs the dispatch again, in the same order on every rank. Both kinds where weights come and go."""
    recipe = Recipe(dp=2, checkpointing=checkpointing)
    check(launcher, recipe, Layout(world=4, tp=2, etp=2, ep=2, stage=stage))


@pytest.mark.sample("2-(1, 1, 4)", "3-(2, 2, 2)")
@pytest.mark.parametrize(
    ("stage", "split"),
    [
        *((stage, (1, 1, 4)) for stage in STAGES),  # two of four ranks get nothing
        (1, (1, 2, 2)),
        (1, (2, 4, 1)),
        (3, (2, 2, 2)),
    ],
    ids=str,
)
def test_experts_nobody_picks(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """All tokens go to experts 0 and 1, so under ep some ranks get no token at all."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    check(launcher, Recipe(dp=layout.dp, pinned=(0, 1)), layout)


@pytest.mark.sample("reentrant")
@pytest.mark.parametrize("checkpointing", ["reentrant", "plain"])
def test_experts_nobody_picks_recomputed(launcher: Launcher, checkpointing: str) -> None:
    """Ranks without tokens take part in the recomputation's messages too."""
    recipe = Recipe(dp=4, pinned=(2, 3), checkpointing=checkpointing)
    check(launcher, recipe, Layout(world=4, etp=2, ep=2, stage=2))


@pytest.mark.sample("3-(4, 1, 2)")
@pytest.mark.parametrize(
    ("stage", "split"),
    [(0, (1, 2, 2)), (3, (2, 2, 1)), (0, (4, 2, 1)), (3, (4, 1, 2)), (1, (2, 4, 1)), (2, (2, 2, 2))],
    ids=str,
)
def test_one_token(launcher: Launcher, stage: int, split: tuple[int, int, int]) -> None:
    """A batch of one token: with tensor parallelism some peers own none."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage)
    recipe = Recipe(dp=layout.dp, rows=1, lengths=(1,), loss="logits")
    check(launcher, recipe, layout)


@pytest.mark.sample("(8, 2, 1)-3")
@pytest.mark.parametrize(
    ("split", "stage"),
    [((2, 4, 1), 1), ((4, 2, 2), 2), ((2, 2, 2), 3), ((8, 2, 1), 1), ((8, 2, 1), 3), ((1, 4, 2), 0), ((2, 4, 2), 2)],
    ids=str,
)
def test_eight_ranks(launcher: Launcher, split: tuple[int, int, int], stage: int) -> None:
    """Layouts that need more ranks, the classic tp 8, etp 2 among them; expert_dp groups of more than one."""
    tp, etp, ep = split
    layout = Layout(world=8, tp=tp, etp=etp, ep=ep, stage=stage)
    changes = (("num_attention_heads", 8), ("num_key_value_heads", 8))
    check(launcher, Recipe(dp=layout.dp, changes=changes, optimizer="adamw"), layout)


@pytest.mark.sample("(2, 4, 1)-sgd")
@pytest.mark.parametrize(
    ("split", "optimizer"),
    [*zip([(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 4, 1), (4, 2, 1)], ["sgd", "adamw"] * 3, strict=True)],
    ids=str,
)
def test_zero_init(launcher: Launcher, split: tuple[int, int, int], optimizer: str) -> None:
    """A model that was built partitioned, with no parameter small enough to stay whole."""
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=3, zero_init=True)
    check(launcher, Recipe(dp=layout.dp, optimizer=optimizer), layout)


@pytest.mark.sample("2-dense", "3-experts")
@pytest.mark.parametrize(
    ("stage", "frozen"),
    [(0, "experts"), (0, "dense"), (1, "experts"), (2, "dense"), (3, "experts"), (3, "dense")],
)
def test_frozen(launcher: Launcher, stage: int, frozen: str) -> None:
    """Trained routers over frozen experts, and the reverse. Stages 1 and 2, one class, share the two."""
    layout = Layout(world=4, tp=2, etp=2, ep=2, stage=stage)
    check(launcher, Recipe(dp=2, frozen=frozen, optimizer="adamw"), layout)


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize(
    ("stage", "extra"),
    [
        (1, (("prescale_gradients", True),)),
        (2, (("communication_data_type", "fp32"),)),
        (2, (("zero_optimization", {"overlap_comm": True, "reduce_bucket_size": 3000}),)),
        (3, (("zero_optimization", {"overlap_comm": True, "reduce_bucket_size": 3000}),)),
    ],
    ids=str,
)
def test_how_gradients_are_reduced(launcher: Launcher, stage: int, extra: tuple[tuple[str, Any], ...]) -> None:
    """Settings that change the order or the scaling of reductions don't change the result."""
    check(launcher, Recipe(dp=2), Layout(world=4, tp=2, etp=2, stage=stage, extra=extra))
