"""Sharded training equals unsharded training wherever two settings meet: the cases of `tests.covering`."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import AXES, Case, covering, fits, pairs_of
from tests.launcher import Launcher
from tests.oracle import train_unsharded
from tests.parity.test_bf16 import assert_as_close_as_plain_bf16
from tests.parity.test_kinds import TOLERANCES
from tests.sharded import train
from tests.tolerances import TENSOR, assert_equal_runs


def test_every_pair_that_can_meet_does() -> None:
    """Found anew, without the table's own search: every combination of all axes that fits is asked for its pairs."""
    possible = set()
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values, strict=True))
        if fits(case):
            possible.update(pairs_of(case))
    covered = {pair for case in covering() for pair in pairs_of(vars(case))}
    assert covered == possible
    assert all(fits(vars(case)) for case in covering())
    # No axis lost a value to the constraints, and the table stays far below the product.
    assert {item for pair in covered for item in pair} == {(axis, value) for axis in AXES for value in AXES[axis]}
    assert len(set(covering())) == len(covering()) < 100


@pytest.mark.parametrize("case", covering(), ids=str)
def test_equals_unsharded(launcher: Launcher, case: Case) -> None:
    recipe, layout = case.recipe, case.layout
    if case.dtype == "bf16":
        assert_as_close_as_plain_bf16(launcher, recipe, layout)
        return
    run = launcher.run(layout.world, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe), tensor=TOLERANCES.get(case.family, TENSOR))
