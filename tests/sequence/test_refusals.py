"""What can't work with split sequences: refused on every rank alike, before the model is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

import ds_etp
from ds_etp.config.block import layout_table
from ds_etp.errors import ConfigError
from tests.config.test_refusals import count_groups, state
from tests.launcher import CaseFailed, Launcher
from tests.sequence.runs import Sequences, train, ulysses
from tests.sharded import Layout, ds_config, make_engine

RECIPE = Sequences()
KV = (*RECIPE.changes, ("num_key_value_heads", 1))
TWO_HEADS = (*RECIPE.changes, ("num_attention_heads", 2), ("num_key_value_heads", 2))


class OtherMpu:
    """A sequence-parallel unit of another library."""

    def get_sequence_parallel_world_size(self) -> int:
        return 2

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name == "get_data_parallel_world_size":
            raise AttributeError(name)
        return lambda: None


@dataclass(frozen=True)
class Case:
    """A setting that must be refused.

    Attributes:
        says: what the message holds.
        layout: sizes, on four ranks; with its sp Ulysses is registered.
        recipe: the model.
        block: entries merged over the config block.
        mpu: what to initialize with: `ulysses`, `other` or nothing.
        left: whether an earlier engine's sequence mpu is still in DeepSpeed.
    """

    says: tuple[str, ...]
    layout: Layout
    recipe: Sequences = RECIPE
    mpu: str = "ulysses"
    left: bool = False


CASES = {
    "heads that tp and sp don't share": Case(
        ("tensor_parallel.autotp_size=2 with sequence parallel size 2", "2 attention heads are not divisible by 4"),
        Layout(world=4, tp=2, sp=2, etp=2),
        recipe=Sequences(changes=TWO_HEADS),
    ),
    "key and value heads": Case(
        ("tensor_parallel.autotp_size=2", "1 key and value heads are not divisible by 2"),
        Layout(world=4, tp=2, sp=2, etp=2),
        recipe=Sequences(changes=KV),
    ),
    "sizes that don't tile": Case(
        ("tensor_parallel.autotp_size=4 does not tile the ranks: tp 4 x cp 2 x pp 1 = 8 does not divide",),
        Layout(world=4, tp=4, sp=2),
    ),
    "experts that don't tile": Case(
        ("expert_tensor_parallel.ep_size=3 does not tile the ranks",), Layout(world=4, sp=2, etp=1, ep=3)
    ),
    "replicated": Case(
        ("expert_tensor_parallel.dispatcher='replicated' needs expert ranks to hold the same tokens",),
        Layout(world=4, sp=2, etp=2, dispatcher="replicated"),
    ),
    "an mpu of another library": Case(
        ("sequence parallel size=2 comes from a device mesh, an earlier engine or an mpu", "UlyssesSPAttentionHF"),
        Layout(world=4, sp=2, etp=2),
        mpu="other",
    ),
    "the mpu of an earlier engine": Case(
        ("sequence parallel size=2 comes from", "UlyssesSPAttentionHF"),
        Layout(world=4, sp=2, etp=2),
        mpu="",
        left=True,
    ),
}


def refused(case: Case) -> tuple[str, int, bool]:
    """The message on this rank, the groups made before it, and whether the model is as it was."""
    ds_etp.register()
    with ulysses(case.recipe.model(), case.layout, case.recipe.rows) as mpu:
        model = case.recipe.model()
        before, known = state(model), count_groups()
        groups.mpu = mpu if case.left else None
        try:
            deepspeed.initialize(
                model=model,
                config=ds_config(case.recipe, case.layout),
                model_parameters=list(model.parameters()),
                mpu={"ulysses": mpu, "other": OtherMpu(), "": None}[case.mpu],
            )
        except ConfigError as error:
            return str(error), count_groups() - known, state(model) == before
    return "not refused", 0, True


@pytest.mark.parametrize("name", CASES)
def test_refused(launcher: Launcher, name: str) -> None:
    case = CASES[name]
    results = launcher.run(case.layout.world, refused, case=case)
    for text, new_groups, unchanged in results:
        assert text == results[0][0], "ranks differ"
        assert all(part in text for part in case.says), text
        assert (new_groups, unchanged) == (0, True)


def other_attention() -> str:
    """Ulysses in the place of one attention function, and a model that uses another."""
    ds_etp.register()
    layout = Layout(world=4, tp=2, sp=2, etp=2)
    with ulysses(RECIPE.model(), layout, RECIPE.rows) as mpu:
        model = RECIPE.model()
        model.set_attn_implementation("eager")
        with pytest.raises(ConfigError) as info:
            deepspeed.initialize(model=model, config=ds_config(RECIPE, layout), mpu=mpu)
    return str(info.value)


def test_attention_that_ulysses_does_not_have(launcher: Launcher) -> None:
    for text in launcher.run(4, other_attention):
        assert "the model's attention 'eager' is not the one that Ulysses was registered for" in text


def groups_with_tp() -> tuple[list[int], list[int], dict[str, str]]:
    """The ranks that share a sequence before and after `initialize`, and the table that is logged."""
    layout = Layout(world=4, tp=2, sp=2, etp=2)
    with ulysses(RECIPE.model(), layout, RECIPE.rows) as mpu:
        before = dist.get_process_group_ranks(mpu.get_sequence_parallel_group())
        engine = make_engine(RECIPE, layout, mpu=mpu)
        after = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
        assert after == dist.get_process_group_ranks(parallel_state_sp.get_sequence_parallel_group())
        table = dict(layout_table(engine.ds_etp.topology, engine.ds_etp.block))
        engine.destroy()
        with pytest.raises(ConfigError, match="does not fit the groups of ranks that share a sequence") as info:
            make_engine(RECIPE, Layout(world=4, sp=2, etp=2), mpu=mpu)
        assert "Values that work: 2." in str(info.value)
    return before, after, table


def test_sequences_are_laid_out_anew_with_tp(launcher: Launcher) -> None:
    results = launcher.run(4, groups_with_tp)
    assert [result[0] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result[1] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for _, _, table in results:
        assert {name: table[name] for name in ("tp", "cp", "dp", "etp")} == {
            "tp": "2",
            "cp": "2",
            "dp": "1",
            "etp": "2",
        }


@dataclass(frozen=True)
class AsBefore(Layout):
    """Gives each rank the part that it had in the groups Ulysses made."""

    def share(self, batch: Any, rank: int) -> Any:
        """Ignores tp."""
        return {name: value.chunk(self.sp, 1)[rank % self.sp].contiguous() for name, value in batch.items()}


def test_parts_dealt_by_the_old_groups(launcher: Launcher) -> None:
    """A script that asked for its sequence rank before `initialize`: AutoTP finds it at the first batch."""
    with pytest.raises(CaseFailed, match="Data inconsistency within the TP group"):
        launcher.run(4, train, recipe=RECIPE, layout=AsBefore(world=4, tp=2, sp=2, etp=2))
