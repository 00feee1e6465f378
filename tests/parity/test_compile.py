"""torch.compile around split experts: one clean graph break, no recompilation from step to step, eager's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_etp.errors import ConfigError
from ds_etp.experts.checks import checked_layouts
from ds_etp.parallel.topology import Topology
from tests.compiled import OURS, QUIET, Traced, compiled_by_itself, dynamo, train_compiled
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.peft.models import LoraRecipe
from tests.sharded import Layout, make_engine, train, with_options
from tests.tolerances import assert_equal_runs, assert_same_bits

# Dense layers and those with experts share their code: of the two, dynamo makes one more graph in the second step.
ALL_SPARSE = (*QUIET, ("first_k_dense_replace", 0))
LIMIT = 300  # dynamo takes seconds for each graph where cores are shared


def quiet(family: str, **options: Any) -> Recipe:
    return Recipe(family, changes=QUIET, **options)


def assert_no_new_graphs(traced: list[Traced]) -> None:
    """Each step routes other tokens elsewhere, so each rank's experts get other numbers of rows."""
    for rank, found in enumerate(traced):
        assert found.warm_up > 0, "nothing was compiled"
        assert found.graphs == found.warm_up, (
            f"rank {rank}: {found.graphs} graphs after {found.warm_up} in the first step"
        )


def run(launcher: Launcher, recipe: Recipe, layout: Layout, how: str, **options: Any) -> tuple[Any, list[Traced]]:
    """The compiled run, and what each rank's dynamo did."""
    recipe = replace(recipe, dp=layout.dp)
    results = launcher.run(
        layout.world, train_compiled, timeout=LIMIT, recipe=recipe, layout=layout, how=how, **options
    )
    return results[0][0], [traced for _, traced in results]


def eager(launcher: Launcher, recipe: Recipe, layout: Layout) -> Any:
    return launcher.run(layout.world, train, recipe=replace(recipe, dp=layout.dp), layout=layout)[0]


@pytest.mark.sample("zero3")
@pytest.mark.parametrize(
    ("how", "recipe", "layout"),
    [
        ("engine", Recipe("mixtral", changes=QUIET[:1]), Layout(2, etp=2, dispatcher="allgather")),
        ("before", quiet("qwen3_moe", lengths=(12, 7)), Layout(2, ep=2, dispatcher="alltoall")),
        ("after", quiet("gpt_oss"), Layout(2, etp=2, stage=2, dtype="bf16", dispatcher="alltoall_etp_first")),
        ("layers", quiet("mixtral"), Layout(2, tp=2, etp=2, dispatcher="replicated")),
        ("layers", quiet("gpt_oss", optimizer="adamw"), Layout(2, ep=2, stage=3, dispatcher="alltoall_etp_first")),
        ("engine", quiet("qwen3_moe"), Layout(2, tp=2, ep=2, stage=3, dispatcher="replicated")),
        ("layers", quiet("mixtral"), with_options(Layout(2, ep=2, dispatcher="alltoall"), recompute=True)),
        ("engine", quiet("qwen3_moe", checkpointing="plain"), Layout(2, ep=2, dispatcher="alltoall")),
        ("engine", Recipe("mixtral", checkpointing="reentrant"), Layout(2, etp=2, stage=3)),
        ("layers", Recipe("deepseek_v3", changes=ALL_SPARSE), with_options(Layout(2, etp=2), overlap=True)),
        ("layers", LoraRecipe(changes=QUIET), Layout(2, etp=2)),
    ],
    ids=[
        *("engine", "before", "after", "tp", "zero3", "tp-zero3"),
        *("recompute", "checkpointing", "reentrant", "overlap", "lora"),
    ],
)
def test_not_a_bit_differs(launcher: Launcher, how: str, recipe: Recipe, layout: Layout) -> None:
    """Backend `eager` runs the very operations that it has traced."""
    compiled, traced = run(launcher, recipe, layout, how)
    assert_no_new_graphs(traced)
    # There the hosts' own breaks leave no traced frame that calls the experts.
    if recipe.checkpointing != "reentrant":
        assert any(OURS in reason for reason in traced[0].breaks), "no break has ds_etp's reason"
    assert_same_bits(eager(launcher, recipe, layout), compiled)


def test_nothing_else_breaks(launcher: Launcher) -> None:
    """One layer, at a stage whose hooks DeepSpeed keeps out of forward: every break is ours.

    Dynamo breaks at a call by giving up the frames around it one by one: layer, block and experts.
    """
    recipe = Recipe("mixtral", steps=2, changes=QUIET)
    layout = Layout(2, etp=2)
    compiled, traced = run(launcher, recipe, layout, "layers", backend="aot_eager")
    assert_no_new_graphs(traced)
    assert traced[0].breaks and traced[0].others == []
    # AOTAutograd takes backward apart into other operations: the same sums in another order.
    assert_equal_runs(compiled, eager(launcher, recipe, layout))


def test_names_that_would_change() -> None:
    with dynamo():
        model = compiled_by_itself(Recipe())
    with pytest.raises(ConfigError, match=r"^model='torch.compile\(MixtralForCausalLM\)' puts '_orig_mod' into"):
        checked_layouts(model, Topology(2, etp=2), {})


def compiled_autograd(recipe: Recipe, layout: Layout) -> str:
    """What an engine says of it."""
    engine = make_engine(recipe, layout)
    try:
        engine.compile("eager", compiled_autograd_enabled=True)
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_compiled_autograd_is_refused(launcher: Launcher) -> None:
    (said,) = launcher.run(1, compiled_autograd, recipe=Recipe(), layout=Layout(1))
    assert said.startswith("engine.compile(compiled_autograd_enabled)=True is not supported"), said
