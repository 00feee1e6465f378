"""Every file, function, class and method that docs/architecture.md names is in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ds_etp"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
# What is quoted and no name of ours: hosts', groups, sizes, files that are written, commands.
OTHERS = {"PipelineModule", "expt_tp", "ep", "tp", "latest", "grouped_mm", "engine.save_checkpoint", "ds-etp"}


def defined() -> set[str]:
    """Names of functions and classes, methods as `Class.method`."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


DEFINED = defined()


@pytest.mark.parametrize("quoted", [name for name in QUOTED if name not in OTHERS])
def test_it_is_there(quoted: str) -> None:
    if quoted.endswith((".py", "/")):
        assert (ROOT / quoted).exists() or (PACKAGE / quoted).exists(), quoted
    else:
        assert quoted in DEFINED, f"{quoted} is no function, class or method of ds_etp"


def test_every_folder_is_there_in_order() -> None:
    folders = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(folders) == packages - {"parameters"} or set(folders) == packages, packages
    assert folders[0] == "config" and folders[-1] == "cli"


def test_every_event_is_there() -> None:
    source = (PACKAGE / "patches" / "deepspeed" / "engine.py").read_text(encoding="utf-8")
    protocol = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineEvents"
    )
    events = [part.name for part in protocol.body if isinstance(part, ast.FunctionDef)]
    section = PAGE[PAGE.index("## Events") : PAGE.index("## One forward")]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == events
