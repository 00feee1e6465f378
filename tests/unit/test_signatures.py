"""The tables of host functions: complete, true of today's hosts, and what a changed host gets."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import GenerationMixin

from ds_etp import engine as extension
from ds_etp.errors import ConfigError
from ds_etp.patches import signatures
from ds_etp.patches.signatures import TABLES, check_signatures, findings

PATCHES = Path(signatures.__file__).parent
KNOWN = {name for table in TABLES.values() for functions in table.values() for name in functions}
CALLS = {"MethodPatch": 1, "override": 1, "swapped": 1}


def literals(node: ast.expr, tree: ast.Module) -> Iterator[str]:
    """The strings an expression can be: a literal, a choice of two, a constant of the module, a loop's variable."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body, tree)
        yield from literals(node.orelse, tree)
    elif isinstance(node, ast.Tuple):
        for element in node.elts:
            yield from literals(element, tree)
    elif isinstance(node, ast.Name):
        for other in ast.walk(tree):
            if isinstance(other, ast.For) and isinstance(other.target, ast.Name) and other.target.id == node.id:
                yield from literals(other.iter, tree)
            elif (
                isinstance(other, ast.For) and isinstance(other.target, ast.Tuple) and isinstance(other.iter, ast.Tuple)
            ):
                for place, target in enumerate(other.target.elts):
                    if isinstance(target, ast.Name) and target.id == node.id:
                        for row in other.iter.elts:
                            if isinstance(row, ast.Tuple):
                                yield from literals(row.elts[place], tree)
            elif isinstance(other, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == node.id for target in other.targets
            ):
                yield from literals(other.value, tree)


def replaced(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every host function that a file replaces: by a patch, an override, or for a while by hand."""
    tree = ast.parse(source)
    hosts = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in TABLES
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            names = list(literals(node.args[CALLS[node.func.id]], tree))
            assert names, f"line {node.lineno}: the name of what is replaced can't be read; write it as a literal"
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Assign):
            attributes = [target for target in node.targets if isinstance(target, ast.Attribute)]
            for target in attributes:
                if isinstance(target.value, ast.Name) and target.value.id in hosts:
                    yield node.lineno, target.attr


FOUND = {
    str(path.relative_to(PATCHES)): list(replaced(path.read_text(encoding="utf-8")))
    for path in sorted(PATCHES.rglob("*.py"))
    if path.name != "base.py"
}


@pytest.mark.parametrize("file", [file for file, found in FOUND.items() if found])
def test_whatever_is_replaced_is_in_a_table(file: str) -> None:
    missing = [f"{file}:{line} {name}" for line, name in FOUND[file] if name not in KNOWN]
    assert not missing, f"{missing}: add it to the host's signatures.py"


def test_the_reader_finds_them() -> None:
    names = {name for found in FOUND.values() for _, name in found}
    # One of each way: a literal, a choice, a loop over a constant, a loop over a tuple, a constant, by hand.
    assert {"_configure_optimizer", "_take_model_step", "_consolidated_16bit_state_dict", "load_state_dir"} <= names
    assert {"_apply_weight_conversions_to_state_dict", "_get_hf_tp_plan", "_SEQUENCE_PARALLEL_GROUP"} <= names
    with pytest.raises(AssertionError, match="line 1: the name"):
        list(replaced("override(engine, made_up(), make)"))


def test_registered_patches_are_in_the_table_of_their_class() -> None:
    for patch in extension._PATCHES:
        places = [place for table in TABLES.values() for place, names in table.items() if patch.name in names]
        name = getattr(patch.host, "__module__", patch.host.__name__)
        assert any(place.partition(":")[0] == name for place in places), (patch.host, patch.name)


@pytest.mark.parametrize("host", TABLES)
def test_todays_hosts_fit(host: str) -> None:
    for place in TABLES[host]:
        pytest.importorskip(place.partition(":")[0])
    found = list(findings(host))
    assert len(found) == sum(map(len, TABLES[host].values()))
    assert [str(finding) for finding in found if not finding.fits] == []


def test_every_changed_function_is_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "_configure_optimizer", lambda self, model_parameters, client_optimizer: None)
    monkeypatch.setattr(DeepSpeedEngine, "clip_fp32_gradients", lambda self, norm: None)
    monkeypatch.delattr(DeepSpeedEngine, "_take_model_step")
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, synced_gpus: None)
    with pytest.raises(ConfigError) as info:
        extension.register()
    text, engine = str(info.value), "deepspeed.runtime.engine.DeepSpeedEngine"
    assert (
        f"{engine}._configure_optimizer is (self, model_parameters, client_optimizer), known: "
        "(self, client_optimizer, model_parameters)" in text
    )
    assert f"{engine}.clip_fp32_gradients is (self, norm), known: (self)" in text
    assert f"{engine}._take_model_step is missing, known: (self, ...)" in text
    assert "transformers.generation.utils.GenerationMixin.generate is (self, synced_gpus), known: " in text
    assert text.count("known:") == 4
    assert 'pip install "deepspeed>=0.18.6,<=0.19.8"' in text
    assert not any(patch.applied for patch in extension._PATCHES if patch.name == "_do_sanity_check")


@pytest.mark.parametrize(
    ("known", "found", "fits"),
    [
        ("self, model", "self, model", True),
        ("self, model", "self, model, extra", False),
        ("self, model", "self, module", False),
        ("self, model", "self", False),
        ("self, ...", "self, model", True),
        ("self, model, ...", "self, tp, model", False),
        ("", "", True),
        ("", "self", False),
        ("self, model", "self, *args, **kwargs", True),  # another library's wrapper hides what is below it
        ("self, model", "-", False),
        ("=", "self", True),
        ("=", "-", False),
        ("-", "-", True),
        ("-", "self", False),
    ],
)
def test_what_fits(known: str, found: str, fits: bool) -> None:
    assert signatures.Finding("name", (known,), found).fits is fits
    assert signatures.Finding("name", ("no, such", known), found).fits is fits


def test_patched_hosts_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`register()` a second time, or below another library's wrapper that names what it wraps."""
    extension.register()
    try:
        monkeypatch.setattr(DeepSpeedEngine, "step", _wrapped(DeepSpeedEngine.step))
        check_signatures()
    finally:
        extension.unregister()


def _wrapped(original: Any) -> Any:
    def step(*everything: Any) -> Any:
        return original(*everything)

    step.__wrapped__ = original  # type: ignore[attr-defined]
    return step


def test_the_check_is_cheap_and_loads_nothing() -> None:
    loaded = set(sys.modules)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        check_signatures()
        times.append(time.perf_counter() - start)
    assert set(sys.modules) == loaded
    # The best of five: it takes 3 ms; the machine may be busy with other things.
    assert min(times) < 0.05


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `python -m ds_etp.patches.signatures` prints, and whether it exits with 0."""
    text, good = signatures.report()
    assert good and "DIFFERS" not in text
    assert "DeepSpeedEngine._configure_optimizer is (self, client_optimizer, model_parameters)" in text
    monkeypatch.setattr(DeepSpeedEngine, "clip_fp32_gradients", lambda self, norm: None)
    text, good = signatures.report()
    assert not good
    assert [line.split()[:3] for line in text.splitlines() if "DIFFERS" in line] == [
        ["DIFFERS", "deepspeed.runtime.engine.DeepSpeedEngine.clip_fp32_gradients", "is"]
    ]
