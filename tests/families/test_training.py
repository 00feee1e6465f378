"""Every family with routed experts trains as it does unsharded, split inside and among ranks; or is refused."""

from __future__ import annotations

import pytest

from tests.families import training
from tests.families.discover import Family, families
from tests.families.special import NOT_TINY
from tests.launcher import Launcher

# Families that are refused, and a phrase of the reason.
REFUSED = {
    "dbrx": "the rows of all experts in one matrix",
    "jetmoe": "one projection of experts",
    "muse_spark": "a norm follows each expert's down projection",
    "nllb_moe": "each expert is a module of its own",
    "switch_transformers": "each expert is a module of its own",
}


# One for each layout of experts that tests/covering.py doesn't train, and those that the table has notes on; all of
# the refused ones, which don't train.
SAMPLE = (
    *("openai_privacy_filter", "deepseek_v4", "llama4", "ernie4_5_vl_moe", "inkling2_loop"),
    *REFUSED,
)


@pytest.mark.sample(*SAMPLE)
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_family(launcher: Launcher, family: Family) -> None:
    assert family.name not in NOT_TINY
    if family.name in REFUSED:
        for message in launcher.run(2, training.refusal, name=family.name):
            assert f"({family.experts}): " in message and REFUSED[family.name] in message
        return
    faults = [fault for world in (2, 4) for fault in launcher.run(world, training.compare, name=family.name)[0]]
    assert not faults, "\n".join(faults)


def test_most_families_are_supported() -> None:
    folders = {family.folder for family in families()}
    assert set(REFUSED) <= folders
    assert len(folders) - len(REFUSED) >= 68
