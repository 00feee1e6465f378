"""Host memory while a model is loaded: the ranks of a machine together hold each expert once, however many they are."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ds_etp
import ds_etp.engine
from tests.launcher import Launcher
from tests.loading.test_weights import engine_of
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config

# 192 MiB of experts in many layers, as in models that need this, and 32 MiB of everything else.
CHANGES = (("num_hidden_layers", 32), ("hidden_size", 256), ("intermediate_size", 256), ("num_local_experts", 8))
EXPERTS = 32 * 8 * 3 * 256 * 256 * 4
TINY = (*CHANGES, ("hidden_size", 16), ("intermediate_size", 16))
# What the sum over ranks may grow by from 2 to 8. At ZeRO-3 each rank holds one parameter's shard (2 MiB here) beside
# its part, while it divides that. Each rank has a model's modules too, 1 to 2 MiB.
GROWTH = 0.10


class _Loaded(Exception):
    """The experts are read: the rest of the engine doesn't matter here."""


def anonymous() -> int:
    """Bytes of this process's memory that no file backs. Pages of mapped files are shared, and leave when needed."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def peak_of(folder: str, config: dict[str, Any]) -> int:
    """The most that loading takes, from `from_pretrained` to when the engine has its experts."""
    gc.collect()
    dist.barrier()
    start = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        engine_of(ds_etp.from_pretrained(folder, config, progress=False), config)
    except _Loaded:
        peak = max(peak, anonymous())
    finally:
        done.set()
        watcher.join()
    return peak - start


def load_peak(tiny: str, large: str, recipe: Recipe, layout: Layout) -> int:
    """The most that loading the large model takes on this rank."""
    # glibc gives tensors back to the system at once where they are larger than 32 MiB, as shards of real models are.
    m_mmap_threshold = -3
    ctypes.CDLL("libc.so.6").mallopt(m_mmap_threshold, 64 * 1024)
    config = ds_config(recipe, layout)

    def stop(_: Any) -> None:
        raise _Loaded

    original, ds_etp.engine.check_sizes = ds_etp.engine.check_sizes, stop  # the last thing done to experts
    try:
        peak_of(tiny, config)  # code that is imported, and threads that are started, when they are first used
        return peak_of(large, config)
    finally:
        ds_etp.engine.check_sizes = original


@pytest.fixture(scope="module")
def pool() -> Iterator[Launcher]:
    """Processes without memory of earlier models."""
    pool = Launcher()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tiny, large = (tmp_path_factory.mktemp(name) for name in ("tiny", "large"))
    Recipe(changes=TINY).model().save_pretrained(tiny)
    Recipe(changes=CHANGES).model().save_pretrained(large)
    return {"tiny": str(tiny), "large": str(large)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("few", "many"),
    [
        (Layout(world=2, etp=2), Layout(world=8, etp=4, ep=2)),
        # Every shard on four ranks, of which each keeps a quarter.
        (Layout(world=2, etp=2, stage=3), Layout(world=8, etp=2, stage=3)),
    ],
    ids=["all shards different", "ZeRO-3"],
)
def test_more_ranks_take_no_more(pool: Launcher, folders: dict[str, str], few: Layout, many: Layout) -> None:
    sums = {}
    for layout in (few, many):
        recipe = Recipe(dp=layout.dp)
        peaks = pool.run(layout.world, load_peak, timeout=240, recipe=recipe, layout=layout, **folders)
        sums[layout.world] = sum(peaks)
        print(layout.world, [round(peak / 2**20, 1) for peak in peaks], sum(peaks) / EXPERTS)
        assert sums[layout.world] >= 0.98 * EXPERTS  # it is measured
    assert sums[8] < (1 + GROWTH) * sums[2], {world: total / EXPERTS for world, total in sums.items()}
