"""What is called after an import that ds_etp waits for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_etp.activation import _CallAfterImport


def test_called_after_one_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when the module is complete; no other import is touched, and the finder is gone afterwards."""
    name = "ds_etp_waits_for_this"
    (tmp_path / f"{name}.py").write_text("begun = True\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    finder = _CallAfterImport(name, lambda: seen.append(sys.modules[name].value))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert finder.find_spec("json.tool") is None and finder in sys.meta_path
    __import__(name)
    assert seen == [3] and finder not in sys.meta_path
    del sys.modules[name]
    __import__(name)
    assert seen == [3]
    del sys.modules[name]
