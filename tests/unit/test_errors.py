"""The house form of a `ConfigError`: key and value, rule, where, what works, next step, in this order."""

from __future__ import annotations

import pytest

from ds_etp.errors import ConfigError, config_error


def test_full_form() -> None:
    error = config_error(
        "expert_tensor_parallel.ep_size",
        3,
        "does not divide 8",
        where="model.layers.3.mlp.experts",
        works=[1, 2],
        label="Sizes that work with world_size=8",
        next_step="See: ds-etp topology --world 8",
    )
    assert str(error) == (
        "expert_tensor_parallel.ep_size=3 does not divide 8 (at model.layers.3.mlp.experts). "
        "Sizes that work with world_size=8: 1, 2. See: ds-etp topology --world 8"
    )


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        (None, "k='v' is wrong."),
        ([], "k='v' is wrong. Values that work: none."),
        (["a", 1], "k='v' is wrong. Values that work: a, 1."),
        ("any size", "k='v' is wrong. Values that work: any size."),
    ],
)
def test_what_works(works: list[object] | str | None, expected: str) -> None:
    assert str(config_error("k", "v", "is wrong", works=works)) == expected


def test_a_question_keeps_its_mark() -> None:
    assert str(config_error("k", 1, "is no key: did you mean 'key'?")) == "k=1 is no key: did you mean 'key'?"


def test_it_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
