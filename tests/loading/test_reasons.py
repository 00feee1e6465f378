"""What is told of a conversion that failed: the exception, in whatever form transformers keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.core_model_loading import Concatenate, SkipParameters, log_conversion_errors

from ds_etp.patches.transformers.lazy_loading import conversion_reason

WRONG = "sizes of tensors don't match"


def kept(extras: Any, op: Any, error: Exception) -> str:
    """The text that transformers keeps of an error."""
    info: Any = SimpleNamespace(conversion_errors={})
    with pytest.raises(SkipParameters), log_conversion_errors("a.weight", info, extras, op):
        raise error
    text: str = info.conversion_errors["a.weight"]
    return text


@pytest.mark.parametrize(
    ("extras", "op", "error", "reason"),
    [
        ((4, "a.weight"), Concatenate(0), ValueError(WRONG), WRONG),
        ("a.weight", None, ValueError(WRONG), WRONG),
        ("a.weight", Concatenate(0), AssertionError(), "AssertionError"),
        (None, Concatenate(0), ValueError(WRONG), f"Concatenate: {WRONG}"),  # one line
        (None, None, ValueError(WRONG), f"None |Error: {WRONG}"),
        (None, Concatenate(0), ValueError(f"{WRONG}:\n3 and 4"), f"Concatenate: {WRONG}: 3 and 4"),
    ],
    ids=["tensors", "parameter", "no message", "one line", "nothing known", "lines of its own"],
)
def test_as_transformers_keeps_it(extras: Any, op: Any, error: Exception, reason: str) -> None:
    assert conversion_reason(kept(extras, op, error)) == reason


def test_nothing() -> None:
    assert conversion_reason("\n") == "transformers gives no reason"
