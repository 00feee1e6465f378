"""Every family of the installed transformers that has routed experts, read from its sources.

Nothing is imported: 500 modeling modules would take minutes and gigabytes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DECORATOR = "use_experts_implementation"


@dataclass(frozen=True)
class Family:
    """One kind of routed experts, and the model it is tested in.

    Attributes:
        name: the folder under `transformers/models`; where that has several experts classes, with the class
            behind a slash.
        module: the dotted name of the modeling module.
        experts: the name of the experts class.
        decorated: whether it takes part in transformers' choice of an experts implementation.
        models: public model classes of the module, in the order of its `__all__`.
    """

    name: str
    module: str
    experts: str
    decorated: bool
    models: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The folder under `transformers/models`."""
        return self.name.partition("/")[0]

    def load(self, name: str) -> Any:
        """A class of the modeling module; imports that module only."""
        return getattr(importlib.import_module(self.module), name)


@cache
def models_folder() -> Path:
    """Where the installed transformers has its models."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None, "transformers is not installed"
    return Path(spec.origin).parent / "models"


@cache
def families() -> tuple[Family, ...]:
    """Every family, by name."""
    return tuple(family for path in sorted(models_folder().glob("*/modeling_*.py")) for family in _read(path))


def family(name: str) -> Family:
    """One family by its name."""
    return next(family for family in families() if family.name == name)


def _read(path: Path) -> list[Family]:
    source = path.read_text(encoding="utf-8")
    if "Experts(" not in source and DECORATOR not in source:
        return []  # spares the parser most of the files
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = {node.name: _is_decorated(node) for node in classes if _holds_routed_experts(node)}
    public = _public_names(tree)
    models = tuple(name for name in public if "PreTrained" not in name and not name.endswith("Config"))
    module = f"transformers.models.{path.parent.name}.{path.stem}"
    return [
        Family(path.parent.name if len(found) == 1 else f"{path.parent.name}/{name}", module, name, decorated, models)
        for name, decorated in found.items()
    ]


def _is_decorated(node: ast.ClassDef) -> bool:
    return any(DECORATOR in ast.unparse(decorator) for decorator in node.decorator_list)


def _holds_routed_experts(node: ast.ClassDef) -> bool:
    """Decorated, or named so. Shared experts see every token, so nothing is routed to them."""
    named_so = node.name.endswith("Experts") and not node.name.endswith("SharedExperts")
    return named_so or _is_decorated(node)


def _public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
