"""`python -m benchmarks.node`: the times, dispatchers, memory and growth of layers on the GPUs of one node.

Every launch is a torchrun. With one GPU only what needs no peer runs, and the page says what is missing; with
none it says so, and runs on the CPU where `--cpu` asks for it, which shows that the script works.

`--check` measures less and judges it: see `node_checks`. Without a GPU it runs what needs none and says what it skips.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cases as rows
from benchmarks import growth, node_checks, runs, torchrun
from benchmarks.charts import draw
from benchmarks.environment import autoep_python
from benchmarks.pool import ROOT
from benchmarks.report import page

# Large enough to keep a GPU busy: what it sends is then worth timing.
GPU_SHAPES = tuple(replace(shape, hidden=2048, intermediate=1024, heads=16, tokens=16384) for shape in rows.SHAPES)


def single() -> list[rows.Case]:
    """What one process can show: that ds_etp without peers costs what plain DeepSpeed does."""
    return [
        rows.Case("DeepSpeed ZeRO-1, dp", "deepspeed", 1),
        rows.Case("transformers, one process", "transformers", 1),
        rows.Case("ds_etp, one process", "ours", 1),
    ]


def layers_on(world: int) -> list[growth.Sweep]:
    """The sweeps over one layer's sizes; those over etp and ep as far as `world` goes."""
    sizes = [row for row in growth.sweeps(world) if row[0] in "TEK"]
    powers = [size for size in (1, 2, 4, 8) if size <= world]
    sizes += [("etp", n, growth.BASE, rows.Case("", "ours", world, etp=n)) for n in powers if world % n == 0]
    sizes += [("ep", n, growth.BASE, rows.Case("", "ours", world, ep=n)) for n in powers if world % n == 0]
    return sizes


def missing(gpus: int, world: int) -> list[str]:
    """What this machine can't show."""
    notes = []
    if gpus == 0:
        notes.append("No GPU: run on the CPU, which says nothing about GPUs.")
    if world == 1:
        notes.append(
            "One process: no tensor or expert parallelism, no dispatcher, no message. It takes 2 GPUs or more."
        )
    return notes


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    import torch

    options = argparse.ArgumentParser(prog="python -m benchmarks.node", description=__doc__)
    options.add_argument("--check", action="store_true", help="lines `ok` or `FAIL`; exit status 1 where one fails")
    options.add_argument("--cpu", action="store_true", help="without GPUs: run small models on the CPU")
    options.add_argument("--world", type=int, help="ranks; by default the largest power of two of GPUs")
    options.add_argument("--rounds", type=int, default=5, help="launches of each case")
    options.add_argument("--steps", type=int, default=10, help="timed steps of a launch")
    options.add_argument("--parts", nargs="+", default=["times", "dispatchers", "overlap", "memory", "layers"])
    options.add_argument("--environment", type=Path, default=ROOT / ".bench", help="where AutoEP's environment goes")
    options.add_argument("--no-autoep", action="store_true", help="leave out the cases that need it")
    options.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks", help="folder of the page")
    arguments = options.parse_args(argv)
    gpus = torch.cuda.device_count()
    if arguments.check:
        sys.exit(node_checks.show(arguments.world or (1 << (gpus.bit_length() - 1) if gpus else 2), arguments.out))
    if not gpus and not arguments.cpu:
        sys.exit("No GPU here. --cpu runs small models on the CPU, to see that this script works.")
    world = arguments.world or 1 << (max(gpus, 1).bit_length() - 1)
    launchers: dict[str, runs.Run] = {"main": torchrun.run}
    turns: dict[str, runs.Together] = {"main": torchrun.together}
    if world > 1 and not arguments.no_autoep:
        autoep = autoep_python(arguments.environment)
        launchers["autoep"] = partial(torchrun.run, python=autoep)
        turns["autoep"] = partial(torchrun.together, python=autoep)
    shapes = GPU_SHAPES if gpus else (rows.SMALLEST,)
    results: dict[str, Any] = {"shapes": shapes, "loads": [os.getloadavg()[0]]}
    compared = rows.cases(world) if world > 1 else single()
    makers = {
        "times": lambda: runs.interleaved(turns, shapes, compared, arguments.rounds, arguments.steps),
        "dispatchers": lambda: (
            runs.interleaved(turns, shapes, rows.plan_cases(world), arguments.rounds, arguments.steps)
            if world > 1
            else {}
        ),
        "overlap": lambda: (
            runs.interleaved(turns, shapes, rows.overlap_cases(world), arguments.rounds, arguments.steps)
            if world > 1
            else {}
        ),
        "memory": lambda: runs.peaks(launchers, shapes[0], compared),
        "layers": lambda: growth.layer_rows(
            torchrun.run, layers_on(world)[: None if gpus else 1], arguments.steps, arguments.rounds
        ),
    }
    for part in arguments.parts:
        print(f"== {part}", flush=True)
        results[part] = makers[part]()
        results["loads"].append(os.getloadavg()[0])
    device = f"{gpus} x {torch.cuda.get_device_name(0)}, {world} used" if gpus else "no GPU used"
    command = " ".join(["python -m benchmarks.node", *(sys.argv[1:] if argv is None else argv)])
    notes = missing(gpus, world)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "results.md"
    target.write_text("\n\n".join([page(results, command, device), *notes]) + "\n", encoding="utf-8")
    for line in [*notes, target, *draw(results, arguments.out)]:
        print(line)


if __name__ == "__main__":
    main()
