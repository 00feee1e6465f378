"""Holds the shape of the package: floors, no torch below F2, host internals under patches/, small files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "ds_etp"
ROOT = Path(__file__).parents[2] / PACKAGE
MAX_LINES = 300

FLOORS = {  # a file imports only from floors below its own, or within it without a cycle; the longest name counts
    "ds_etp.errors": 0,
    "ds_etp.log": 0,
    "ds_etp.aliases": 0,
    "ds_etp.parallel.topology": 0,
    "ds_etp.dispatch.cost": 0,
    "ds_etp.config": 1,
    "ds_etp.planner": 1,
    "ds_etp.cli.topology_svg": 1,
    "ds_etp.monitor": 1,
    "ds_etp.parallel": 2,
    "ds_etp.monitor.router_load": 2,
    "ds_etp.experts": 3,
    "ds_etp.dispatch": 3,
    "ds_etp.checkpoint": 4,
    "ds_etp.loading": 4,
    "ds_etp.patches": 5,
    "ds_etp.patches.torch": 2,
    "ds_etp.patches.transformers.experts_flags": 3,
    "ds_etp.parameters": 5,
    "ds_etp.checkpoint.api": 5,
    "ds_etp.checkpoint.export_api": 5,
    "ds_etp.experts.build": 6,
    "ds_etp.experts.checks": 6,
    "ds_etp.pipeline": 6,
    "ds_etp.engine": 6,
    "ds_etp.activation": 6,
    "ds_etp.loading.from_pretrained": 6,
    "ds_etp.cli": 6,
    "ds_etp": 7,
    "ds_etp.integrations": 7,
    "ds_etp.__main__": 7,
}
TORCH_FREE = (0, 1)
HOSTS = ("deepspeed", "transformers", "accelerate", "peft", "trl", "openrlhf", "swift")
# DeepSpeed's registry of process groups is module state of the host: few files may reach for it.
HOST_GROUPS = "deepspeed.utils.groups"
HOST_GROUPS_USERS = ("ds_etp.parallel.process_groups", "ds_etp.patches")
# Private names of torch, which is no host: its releases keep them, as half of all libraries use them.
TORCH_NAMES = {
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "_version"),
    *("_make_wrapper_subclass", "_schema", "_to_copy", "_assert_async", "_unsafe_view"),
    *("_C", "_current_graph_task_id"),
}


@dataclass(frozen=True)
class Import:
    """One imported name: `module` is dotted and absolute, `name` what is taken from it ("" for a plain import)."""

    module: str
    name: str
    line: int

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def module_name(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a file: `ds_etp.patches` for patches/__init__.py."""
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of a file, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                yield Import(origin, alias.name, node.lineno)


FILES = sorted(ROOT.rglob("*.py"))
MODULES = {module_name(path): path for path in FILES}
IMPORTS = {
    module: list(imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))
    for module, path in MODULES.items()
}
by_file = pytest.mark.parametrize("module", MODULES, ids=str)


def is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def floor_of(module: str) -> int:
    """That of the longest entry of FLOORS a module lies in; the package's own covers nothing but itself."""
    entries = [entry for entry in FLOORS if is_within(module, entry) and (entry != PACKAGE or module == PACKAGE)]
    assert entries, f"{module}: add it to FLOORS, and to docs/architecture.md"
    return FLOORS[max(entries, key=len)]


def own_target(entry: Import) -> str | None:
    """The module of this package that an import runs, or None for an import from elsewhere."""
    if entry.module.split(".")[0] != PACKAGE:
        return None
    return entry.dotted if entry.dotted in MODULES else entry.module


@by_file
def test_every_file_has_a_floor(module: str) -> None:
    floor_of(module)


@by_file
def test_imports_go_down(module: str) -> None:
    floor = floor_of(module)
    for entry in IMPORTS[module]:
        target = own_target(entry)
        if target is not None:
            assert floor_of(target) <= floor, f"{module}:{entry.line} imports {target} from a floor above"


def test_no_cycles() -> None:
    graph = {
        module: {target for entry in entries if (target := own_target(entry)) not in (None, module)}
        for module, entries in IMPORTS.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@by_file
def test_no_torch_on_the_lowest_floors(module: str) -> None:
    if floor_of(module) in TORCH_FREE:
        heavy = {"torch", *HOSTS} & {entry.module.split(".")[0] for entry in IMPORTS[module]}
        assert not heavy, f"{module} imports {sorted(heavy)}"


@pytest.mark.parametrize(
    "module", ["ds_etp", "ds_etp.config.block", "ds_etp.parallel.topology", "ds_etp.dispatch.cost", "ds_etp.cli.main"]
)
def test_importing_stays_light(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {('torch', *HOSTS)!r} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]", f"import {module} pulled in {result.stdout.strip()}"


@by_file
def test_host_internals_only_under_patches(module: str) -> None:
    if is_within(module, "ds_etp.patches"):
        return
    for entry in IMPORTS[module]:
        parts = entry.dotted.split(".")
        if parts[0] in HOSTS:
            private = [part for part in parts[1:] if part.startswith("_")]
            assert not private, f"{module}:{entry.line} imports {entry.dotted}: private names belong under patches/"


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def own_names(source: str) -> set[str]:
    """The private functions, classes, module constants, fields and attributes of `self` that a file defines."""
    tree = ast.parse(source)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Module | ast.ClassDef):
            targets = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
            targets += [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_touches(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every private attribute that isn't of `self`: by a dot, or by name in getattr and its like."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and is_private(name):
                yield node.lineno, str(name)


# Not those of patches/: a replacement has the name of the host's function.
OWN_NAMES = {
    name
    for module, path in MODULES.items()
    if not is_within(module, "ds_etp.patches")
    for name in own_names(path.read_text(encoding="utf-8"))
}


@by_file
def test_host_attributes_only_under_patches(module: str) -> None:
    # DeepSpeed's table of expert groups has one owner, on a floor below the patches.
    if is_within(module, "ds_etp.patches") or module == "ds_etp.parallel.process_groups":
        return
    touched = private_touches(MODULES[module].read_text(encoding="utf-8"))
    found = [f"{module}:{line} {name}" for line, name in touched if name not in OWN_NAMES | TORCH_NAMES]
    assert not found, f"{found}: a host's private names belong under patches/<host>/, behind a function that says why"


@by_file
def test_few_files_touch_deepspeeds_groups(module: str) -> None:
    if not any(is_within(module, user) for user in HOST_GROUPS_USERS):
        taken = [entry.line for entry in IMPORTS[module] if f"{entry.dotted}.".startswith(f"{HOST_GROUPS}.")]
        assert not taken, f"{module}:{taken} imports {HOST_GROUPS}"


@by_file
def test_files_stay_small(module: str) -> None:
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{module} has {lines} lines: split it"


def test_the_walls_are_tested() -> None:
    """The reader of imports sees what it must: nested, relative and renamed imports."""
    source = (
        "import torch as t\nimport a.b, c\nfrom deepspeed.runtime import _x as y\n"
        "def f():\n    from . import base\n    from ..errors import ConfigError\n"
    )
    found = [(entry.dotted, entry.line) for entry in imports(source, "ds_etp.patches.deepspeed")]
    assert found == [
        ("torch", 1),
        ("a.b", 2),
        ("c", 2),
        ("deepspeed.runtime._x", 3),
        ("ds_etp.patches.base", 5),
        ("ds_etp.errors.ConfigError", 6),
    ]
    source = (
        "def f(self, engine):\n    engine._config\n    self._own = getattr(engine, '_experts', None)\n    engine._own\n"
    )
    assert list(private_touches(source)) == [(2, "_config"), (3, "_experts"), (4, "_own")]
    assert own_names(source) == {"_own"}
    package = [entry.dotted for entry in imports("from . import base\n", "ds_etp.patches", is_package=True)]
    assert package == ["ds_etp.patches.base"]
    assert floor_of("ds_etp.patches.base") == 5
    assert floor_of("ds_etp.checkpoint.api") == 5
    assert floor_of("ds_etp.parallel.topology") == 0
    assert floor_of("ds_etp") == 7
    assert own_target(Import("torch.nn", "Module", 1)) is None
    assert own_target(Import("ds_etp.errors", "ConfigError", 1)) == "ds_etp.errors"
