"""What code between router and experts' results may not call: sums in any order, and waits that nobody counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "ds_etp"
FILES = [
    *sorted((ROOT / "dispatch").glob("*.py")),
    *(ROOT / "parallel" / f"{name}.py" for name in ("autograd", "async_ops", "collectives", "host", "packed")),
    *(ROOT / "experts" / f"{name}.py" for name in ("sharded", "adapters", "shared_overlap")),
    ROOT / "patches" / "transformers" / "grouped_mm.py",
]
# On CUDA these add with atomics, in any order, and in the rows' own dtype. `dispatch.segments` adds instead.
ATOMIC = {"index_add", "scatter_add", "scatter_reduce", "index_reduce", "put", "index_put"}
# The host waits for the device, or may, where a tensor of the device's is asked.
WAITING = {"cpu", "item", "numpy", "nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere"}
ALLOWED = {
    ("host.py", "cpu"),  # to_host, the one way
    ("host.py", "numpy"),
    ("adapters.py", "nonzero"),  # where a block doesn't say how many experts a token chooses
}


def forbidden(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call in a file that may not be."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr.removesuffix("_")
        keywords = {keyword.arg for keyword in node.keywords}
        sized = name == "repeat_interleave" and "output_size" not in keywords
        if name in ATOMIC | WAITING or "accumulate" in keywords or sized:
            yield node.lineno, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_atomics_and_no_hidden_waits(path: Path) -> None:
    found = [
        (line, name) for line, name in forbidden(path.read_text(encoding="utf-8")) if (path.name, name) not in ALLOWED
    ]
    assert not found, f"{path.name}: {found}. Sums: dispatch.segments. Values of the device: parallel.host.to_host"


def test_the_reader_sees_them() -> None:
    source = (
        "y.index_add_(0, i, x)\ny.scatter_add(0, i, x)\ny.index_put_((i,), x, accumulate=True)\nx.cpu()\n"
        "x.repeat_interleave(n)\nx.repeat_interleave(n, output_size=3)\nx.index_copy(0, i, y)\nx.nonzero()\n"
    )
    assert [line for line, _ in forbidden(source)] == [1, 2, 3, 4, 5, 8]
