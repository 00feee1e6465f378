"""`python -m benchmarks`: measures everything on this machine's CPU and writes a page and its charts."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import cases as rows
from benchmarks import growth, routing, runs, traffic
from benchmarks.charts import draw
from benchmarks.environment import autoep_python
from benchmarks.pool import ROOT, Pool
from benchmarks.report import page

PARTS = ("times", "dispatchers", "overlap", "messages", "memory", "wire", "layers", "groups", "routing")


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer launches: shows that it runs, no more")
    options.add_argument("--smallest", action="store_true", help="tiny models too, one launch: for tests")
    options.add_argument("--rounds", type=int, help="launches of each case")
    options.add_argument("--steps", type=int, help="timed steps of a launch")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--cases", nargs="+", help="only cases of these names, of `times` and `memory`")
    options.add_argument("--environment", type=Path, default=ROOT / ".bench", help="where AutoEP's environment goes")
    options.add_argument("--no-autoep", action="store_true", help="leave out the cases that need it")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of results.md and charts")
    return options


def measure(arguments: argparse.Namespace, pools: dict[str, Pool], write: Callable[[dict[str, Any]], None]) -> None:
    """The parts asked for, in their order; `write` is called with all results after each."""
    small, quick = arguments.smallest, arguments.quick or arguments.smallest
    rounds = arguments.rounds or (1 if small else 2 if quick else 5)
    steps = arguments.steps or (1 if small else 2 if quick else 10)
    shapes = (rows.SMALLEST,) if small else rows.SHAPES
    main = pools["main"].run
    launchers = {name: pool.run for name, pool in pools.items()}
    turns = {name: pool.together for name, pool in pools.items()}
    compared = [case for case in rows.cases() if not arguments.cases or case.name in arguments.cases]
    makers = {
        "times": lambda: runs.interleaved(turns, shapes, compared, rounds, steps),
        "dispatchers": lambda: runs.interleaved(
            turns, shapes, rows.plan_cases()[: 3 if small else None], rounds, steps
        ),
        "overlap": lambda: runs.interleaved(turns, shapes, rows.overlap_cases()[: 2 if small else None], rounds, steps),
        "messages": lambda: runs.interleaved(turns, shapes, rows.message_cases()[: 2 if small else None], 1, 1),
        "memory": lambda: runs.peaks(launchers, shapes[0], compared),
        "wire": lambda: traffic.wire_rows(
            main,
            rows.WIRE_LAYOUTS[:1] if small else rows.WIRE_LAYOUTS,
            (2,) if small else (2, 4, 8),
            owned=64 if small else traffic.OWNED,
        ),
        "layers": lambda: growth.layer_rows(main, growth.sweeps()[:1] if small else growth.sweeps(), steps, rounds),
        "groups": lambda: main(1, "benchmarks.growth:groups", worlds=list(growth.WORLDS[: 2 if small else None]))[0],
        "routing": lambda: main(
            1, "benchmarks.routing:host_rows", sizes=list(routing.SIZES), repeats=20 if small else 400
        )[0],
    }
    results: dict[str, Any] = {"shapes": shapes, "loads": [os.getloadavg()[0]]}
    for part in arguments.parts:
        print(f"== {part}", flush=True)
        results[part] = makers[part]()
        results["loads"].append(os.getloadavg()[0])
        write(results)


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = parser().parse_args(argv)
    pythons = {"main": sys.executable}
    if not (arguments.no_autoep or arguments.smallest):
        pythons["autoep"] = autoep_python(arguments.environment)
    given = list(sys.argv[1:] if argv is None else argv)
    if "--out" in given:  # where the page went is of no interest to its readers
        del given[given.index("--out") : given.index("--out") + 2]
    command = shlex.join(["python", "-m", "benchmarks", *given])
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "results.md"

    def write(results: dict[str, Any]) -> None:
        target.write_text(page(results, command, "no GPU used"), encoding="utf-8")
        print(*[target, *draw(results, arguments.out)], sep="\n", flush=True)

    with tempfile.TemporaryDirectory(prefix="ds_etp-bench-") as logs:
        pools = {name: Pool(python, Path(logs) / f"{name}.log") for name, python in pythons.items()}
        try:
            measure(arguments, pools, write)
        finally:
            for pool in pools.values():
                pool.close()


if __name__ == "__main__":
    main()
