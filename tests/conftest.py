"""One pool of worker processes for the whole session."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# DeepSpeed decorates its Muon with torch.compile when it makes the first engine, which would bring all of Inductor:
# seconds in every process. Nothing that is tested is compiled.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# The same ninja for all, the environment's own: one of another version takes what is compiled for out of date.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
# Where `make` has compiled DeepSpeed's collectives. Compiling them elsewhere takes a minute, and a rank that is killed
# meanwhile leaves a lock that every later run waits for.
_COMPILED = Path(sys.prefix) / "torch_extensions"
if _COMPILED.is_dir():
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_COMPILED))

from tests.launcher import Launcher  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`: what `make test-full` adds."""
    parser.addoption("--full", action="store_true", help="run the whole matrices too: every test, every case")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `full`, and of a test marked `sample` all cases but those it names.

    A sample names cases by their id, or by their number where ids are long. A case that is asked for on the command
    line runs in any case.
    """
    if config.option.full or any("[" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for test, found in cases.items():
        if found[0].get_closest_marker("full"):
            left_out.update(found)
        elif (sample := found[0].get_closest_marker("sample")) is not None:
            ids = [item.nodeid.partition("[")[2].removesuffix("]") for item in found]
            wanted = {ids[case] if isinstance(case, int) else case for case in sample.args}
            if unknown := wanted - set(ids):
                raise pytest.UsageError(f"{test}: its sample names cases that it doesn't have: {sorted(unknown)}")
            left_out.update(item for item, case in zip(found, ids, strict=True) if case not in wanted)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Runs functions on several real processes."""
    pool = Launcher()
    yield pool
    pool.close()
