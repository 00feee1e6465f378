"""One pool of worker processes for the whole session."""

from __future__ import annotations

import os
import sys
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


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Runs functions on several real processes."""
    pool = Launcher()
    yield pool
    pool.close()
