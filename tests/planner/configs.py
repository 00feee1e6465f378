"""Published values of models' configs, and random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "configs"
PUBLISHED = sorted(path.stem for path in FOLDER.glob("*.json"))


def path_of(name: str) -> Path:
    """The file with a published model's values."""
    return FOLDER / f"{name}.json"


def values_of(name: str) -> dict[str, Any]:
    """A published model's values."""
    values: dict[str, Any] = json.loads(path_of(name).read_text(encoding="utf-8"))
    return values
