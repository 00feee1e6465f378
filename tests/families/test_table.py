"""docs/models.md is what `make docs` writes, and says of each family what the training tests show."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from tests import covering
from tests.families.discover import families
from tests.families.table import DOCUMENT, NOTES, document, rows
from tests.families.test_training import REFUSED, SAMPLE


def test_the_page_is_up_to_date() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    written_with = dict(re.findall(r"\b(transformers|DeepSpeed) (\d[\w.]*\w)", page))
    for name, release in written_with.items():
        if version(name.lower()) != release:
            pytest.skip(f"docs/models.md is of {name} {release}, and {version(name.lower())} is installed")
    assert set(written_with) == {"transformers", "DeepSpeed"}
    assert page == document(), "run: make docs"


def test_it_refuses_what_the_training_tests_refuse() -> None:
    refused = {row.family.name: row.refusal for row in rows() if row.refusal}
    assert set(refused) == set(REFUSED)
    assert all(REFUSED[name] in reason for name, reason in refused.items())


def test_every_family_has_a_line_of_its_own() -> None:
    assert [row.family for row in rows()] == list(families())
    assert all("|" not in cell for row in rows() for cell in row.cells())
    assert set(NOTES) <= {family.name for family in families()}


def test_make_test_trains_every_layout() -> None:
    """`make test` trains a family of each layout or more: those of the sample here, and those of tests/covering.py."""
    layouts = {row.family.name: row.layout for row in rows() if not row.refusal}
    trained = {*SAMPLE, *(name.removesuffix("_text") for name in covering.AXES["family"])}
    assert {layout for name, layout in layouts.items() if name in trained} == set(layouts.values())
