"""What is called after an import that ds_etp waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ds_etp.activation import VARIABLE, _CallAfterImport

ROOT = Path(__file__).parents[2]


def test_called_after_one_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when the module is complete; no other import is touched, and the finder is gone afterwards."""
    name = "ds_etp_waits_for_this"
    (tmp_path / f"{name}.py").write_text("begun = True\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    finder = _CallAfterImport(name, lambda: seen.append(sys.modules[name].value))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert finder.find_spec("json.tool") is None and finder in sys.meta_path
    # Looking whether it is there, as hosts do, is no import.
    assert find_spec(name) is not None and not seen and finder in sys.meta_path
    __import__(name)
    assert seen == [3] and finder not in sys.meta_path
    del sys.modules[name]
    __import__(name)
    assert seen == [3]
    del sys.modules[name]


def test_looking_for_deepspeed_before_importing_it() -> None:
    """transformers looks by `find_spec`, long before anything imports it: the import that follows still registers."""
    startup = (ROOT / "ds_etp.pth").read_text().strip()
    code = (
        f"{startup}; {startup}\n"  # an environment within an environment reads it twice
        "from importlib.util import find_spec\n"
        "found = [find_spec('deepspeed'), find_spec('deepspeed')]\n"
        "import deepspeed\n"
        "from ds_etp.engine import is_registered\n"
        "left = [finder for finder in sys.meta_path if getattr(finder, '__name__', '') == 'ds_etp']\n"
        "print('\\nSAID', all(found), is_registered(), len(left))\n"
    )
    environment = {**os.environ, VARIABLE: "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "SAID True True 0" in done.stdout, done.stdout + done.stderr
