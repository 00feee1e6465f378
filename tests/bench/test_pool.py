"""Launches side by side: one is at work at a time, and one that fails stops no other."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from benchmarks.pool import Launch, LaunchFailed, Pool


@pytest.mark.full
def test_launches_take_turns(tmp_path: Path) -> None:
    pool = Pool(sys.executable, tmp_path / "log")
    try:
        spans = Launch(2, "tests.bench.ranks:spans", {"steps": 4})
        first, failed, second = pool.together([spans, Launch(2, "tests.bench.ranks:fails", {}), spans])
    finally:
        pool.close()
    assert isinstance(failed, LaunchFailed) and "ValueError: no more" in str(failed)
    assert isinstance(first, list) and isinstance(second, list)
    # A turn of a launch is that of all its ranks.
    steps = [
        [(min(begin for begin, _ in ranks), max(end for _, end in ranks), name) for ranks in zip(*launch, strict=True)]
        for name, launch in (("first", first), ("second", second))
    ]
    in_order = sorted(steps[0] + steps[1])
    assert [name for *_, name in in_order] == ["first", "second"] * 4
    for (_, end, _), (begin, _, _) in itertools.pairwise(in_order):
        assert end <= begin
