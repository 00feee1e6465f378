"""`recompute`: what it frees, and that it changes not a bit of what is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_etp.parallel.topology import Topology
from ds_etp.planner.configs import read_facts
from ds_etp.planner.memory import Job, activations
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.planner.test_real_activations import LENGTH, ROWS, kept_bytes, recipe_of
from tests.sharded import Layout, make_engine, train, with_options
from tests.tolerances import assert_same_bits


@pytest.mark.sample("alltoall_etp_first", "allgather", "sentinels")
@pytest.mark.parametrize(
    ("dispatcher", "split", "stage", "recipe"),
    [
        ("alltoall", (1, 2, 2), 3, Recipe(lengths=(12, 5, 9, 3))),
        ("alltoall_etp_first", (2, 2, 2), 2, Recipe(checkpointing="reentrant", pinned=(0, 1))),
        ("allgather", (1, 2, 2), 1, Recipe("gpt_oss", implementation="grouped_mm")),
        ("replicated", (4, 1, 2), 0, Recipe("qwen3_moe", checkpointing="plain", frozen="dense")),
        ("allgather", (4, 2, 2), 2, Recipe("gpt_oss", implementation="grouped_mm")),  # with sentinels
    ],
    ids=["alltoall", "alltoall_etp_first", "allgather", "replicated", "sentinels"],
)
def test_not_a_bit_differs(
    launcher: Launcher,
    dispatcher: str,
    split: tuple[int, int, int],
    stage: int,
    recipe: Recipe,
) -> None:
    tp, etp, ep = split
    layout = Layout(world=4, tp=tp, etp=etp, ep=ep, stage=stage, dispatcher=dispatcher)
    recipe = replace(recipe, dp=layout.dp, steps=2)
    kept, again = (
        launcher.run(4, train, recipe=recipe, layout=with_options(layout, recompute=on))[0] for on in (False, True)
    )
    assert_same_bits(kept, again)


def replaced_while_forward_runs(recipe: Recipe, layout: Layout) -> str:
    """What backward says where something other than an adapter changes weights for the duration of forward."""
    engine = make_engine(recipe, layout)
    experts = engine.module.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, _: vars(module).update(down_proj=2 * module.down_proj))
    experts.register_forward_hook(lambda module, *_: vars(module).__delitem__("down_proj"))
    try:
        engine.backward(recipe.compute_loss(engine, recipe.batch(0, 0, 0)))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_weights_that_only_forward_had(launcher: Launcher) -> None:
    """Without this, the experts would run again on others, and gradients would be wrong in silence."""
    layout = with_options(Layout(1, stage=0), recompute=True)
    (said,) = launcher.run(1, replaced_while_forward_runs, recipe=Recipe(), layout=layout)
    assert said.startswith("model.layers.0.mlp.experts has other weights in backward than it had in forward"), said


def test_what_is_not_kept(launcher: Launcher) -> None:
    """The rows that came and what experts make of them: all that the planner has under the two names."""
    recipe, layout = recipe_of("qwen3_moe"), Layout(world=2, ep=2, dtype="bf16")
    kept, rest = (
        sum(launcher.run(2, kept_bytes, recipe=recipe, layout=with_options(layout, recompute=on))) / 2
        for on in (False, True)
    )
    facts = read_facts(recipe.model().config.to_dict(), "qwen3_moe")
    planned = activations(facts, Topology(2, ep=2), Job(LENGTH, ROWS, 1, recompute=False))
    # Of a row without shared experts; a tenth is for chance in routing, as with all that is kept.
    assert kept - rest == pytest.approx(facts.moe_layers * (planned.experts + planned.dispatch), rel=0.1)
