"""What a run writes of its routers: the counts of the unsharded model in one process, and the rows that were sent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Launcher
from tests.monitor.runs import Counts, OnlyHead, shown, train_shown, unsharded_counts, written
from tests.oracle import Recipe
from tests.peft.models import ONLY_ATTENTION
from tests.pipeline.lm_runs import Case
from tests.pipeline.lm_runs import train as train_pipeline
from tests.sequence.runs import Sequences
from tests.sequence.runs import train as train_sequences
from tests.sharded import Layout

CASES: dict[str, tuple[Recipe, Layout, dict[str, Any]]] = {
    "tp 2, etp 2, ep 2, reentrant": (
        Recipe("qwen3_moe", accumulate=2, checkpointing="reentrant", steps=4),
        Layout(4, tp=2, etp=2, ep=2, stage=2, dispatcher="alltoall"),
        {},
    ),
    # Shared experts come after the routed ones: torch recomputes no further than to the last tensor that is needed.
    "ep 2, non-reentrant, recompute": (
        Recipe("glm4_moe", checkpointing="plain", steps=4, lengths=(12, 7)),
        Layout(2, ep=2, stage=3, dispatcher="allgather"),
        {"recompute": True},
    ),
    "replicated": (
        Recipe(accumulate=2, steps=2),
        Layout(2, tp=2, etp=2, stage=0, dispatcher="replicated"),
        {},
    ),
    "ETP first, overlap": (
        Recipe("deepseek_v3", steps=2, lengths=(5, 9, 3, 12), pinned=(0, 1, 2)),
        Layout(4, etp=2, ep=2, stage=1, dispatcher="alltoall_etp_first"),
        {"overlap": True},
    ),
    "experts without weights": (Recipe("longcat_flash", steps=2), Layout(2, ep=2, dispatcher="alltoall"), {}),
    "rows by expert": (
        Recipe("llama4_text", steps=2, changes=(("num_experts_per_tok", 1),)),
        Layout(2, etp=2, dispatcher="alltoall"),
        {},
    ),
    "LoRA on attention": (replace(ONLY_ATTENTION, steps=2), Layout(2, ep=2, stage=2), {}),
    # Without a gradient to the experts' outputs there is no backward that counts.
    "nothing below the experts trains": (
        OnlyHead(steps=2),
        Layout(2, ep=2, stage=0),
        {},
    ),
}


def by_report(values: dict[str, list[float]], counts: Counts) -> Counts:
    """What was written, in the form of the unsharded counts."""
    return {
        layer: [
            [int(values[f"router_tokens_{layer}_{expert}"][number]) for expert in range(len(of_report))]
            for number, of_report in enumerate(reports)
        ]
        for layer, reports in counts.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_unsharded_model(launcher: Launcher, tmp_path: Path, name: str) -> None:
    recipe, layout, options = CASES[name]
    recipe = replace(recipe, dp=layout.dp)
    sent = launcher.run(layout.world, train_shown, recipe=recipe, layout=shown(layout, tmp_path, **options))
    values, expected = written(tmp_path), unsharded_counts(recipe, steps_a_report=2)
    assert values.pop("router_global_step") == list(range(2, recipe.steps + 1, 2))
    assert by_report(values, expected) == expected
    layers, reports = list(expected), recipe.steps // 2
    for layer, of_layer in expected.items():
        assert all(len(values[f"router_{metric}_{layer}"]) == reports for metric in ("max_over_mean", "entropy"))
        for number, tokens in enumerate(of_layer):
            total = sum(tokens)
            assert values[f"router_max_over_mean_{layer}"][number] == pytest.approx(max(tokens) / (total / len(tokens)))
            shares = [count / total for count in tokens if count]
            even = -sum(share * math.log(share) for share in shares) / math.log(len(tokens))
            assert values[f"router_entropy_{layer}"][number] == pytest.approx(even)
            assert values[f"router_unused_experts_{layer}"][number] == tokens.count(0)
    owned = sum(
        recipe.batch(step, micro, rank)["input_ids"].numel()
        for step in range(2)
        for micro in range(recipe.accumulate)
        for rank in range(recipe.dp)
    )
    # Of all layers, over all ranks: what a recorder of collectives saw in the forwards of the first two steps.
    told = sum(values[f"router_rows_sent_{layer}"][0] for layer in layers) * owned
    assert told == pytest.approx(sum(sum(of_rank[:2]) for of_rank in sent))


def train_stages(recipe: Recipe, case: Case) -> None:
    """Trains a pipeline."""
    train_pipeline(recipe, case)


def test_every_stage_of_a_pipeline(launcher: Launcher, tmp_path: Path) -> None:
    """Layers are named by their place in the pipeline: embeddings are its layer 0."""
    recipe = Recipe(accumulate=2, steps=2, dp=2)
    case = Case(shown(Layout(4, ep=2, stage=1), tmp_path))
    launcher.run(4, train_stages, recipe=recipe, case=case)
    values, expected = written(tmp_path), unsharded_counts(recipe, steps_a_report=2)
    stages = sorted({name.split("_")[3] for name in values if name.startswith("router_rows_sent_")})
    assert len(stages) == len(expected) == 2
    renamed = dict(zip(stages, expected.values(), strict=True))
    assert by_report(values, renamed) == renamed


def test_ranks_that_share_sequences(launcher: Launcher, tmp_path: Path) -> None:
    """Under Ulysses each rank routes its own part of a sequence; tensor-parallel ranks route the same one."""
    layout = Layout(4, tp=2, sp=2, etp=2, ep=2, stage=1)
    recipe = Sequences(steps=2)
    launcher.run(4, train_sequences, recipe=recipe, layout=shown(layout, tmp_path))
    expected = unsharded_counts(recipe, steps_a_report=2)
    assert by_report(written(tmp_path), expected) == expected


def test_layers_only(launcher: Launcher, tmp_path: Path) -> None:
    recipe = Recipe(steps=2)
    launcher.run(1, train_shown, recipe=recipe, layout=shown(Layout(1), tmp_path, "layers", monitor_interval=1))
    values = written(tmp_path)
    assert values["router_global_step"] == [1, 2]
    assert not any(name.startswith("router_tokens") for name in values)
    assert sum(name.startswith("router_entropy") for name in values) == 2
    assert values["router_rows_sent_model.layers.0.mlp"] == [0, 0]
