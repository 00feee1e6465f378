"""`python -m benchmarks.node --check`: what GPUs have to show, each a line `ok` or `FAIL` with its figure.

Every check is a launch of its own: a device that is lost, or a rank that hangs, takes no other check with it. Those
that need no CUDA run on the CPU too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import node_layers as layers
from benchmarks import torchrun
from benchmarks.cases import Case
from benchmarks.node_runs import cases_on, difference, make_engine, shape_here, state, train
from benchmarks.pool import LaunchFailed
from benchmarks.timing import Clock
from benchmarks.trainees import batch

# ds_etp with nothing split has plain DeepSpeed's work to do, and overlap has no more than without: the rest is noise.
SLOWER = 1.1
# What overlap has to hide of the messages' time, at least, beyond what is hidden without.
HIDDEN = 0.05
# Of one number in bf16, 2**-9, over the five roundings from tokens to outputs; gradients have a few more.
BF16_ERROR = 2e-2
# MiB that rounds of making and destroying groups may leave, each beyond the first: what a CUDA allocation rounds to.
LEFT = 8


@dataclass(frozen=True)
class Result:
    """What a check found.

    Attributes:
        name: of the check.
        ok: None where it could not run here.
        figure: what was measured, or why it was skipped.
    """

    name: str
    ok: bool | None
    figure: str

    def line(self) -> str:
        """As it is printed."""
        if self.ok is None:
            return f"{self.name:<14} skipped ({self.figure})"
        return f"{self.name:<14} {'ok  ' if self.ok else 'FAIL'}  {self.figure}"


def host_reads(name: str, folder: str, *, mode: str = "default") -> Result:
    """Reads of the host in a layer: at most one forward, none backward; in mode `error` no other wait either."""
    shape, device = shape_here()
    figures, ok = [], True
    if mode == "error" and not layers.sees_waits(device):
        return Result(name, False, "sync debug mode lets .item() pass")
    for case in cases_on(dist.get_world_size()):
        with layers.sharded_block(shape, case, device, torch.bfloat16) as block:
            hidden = torch.randn(1, shape.tokens // case.dp, shape.hidden, device=device, dtype=torch.bfloat16)
            hidden.requires_grad_()
            reads = [layers.reads_of(block, hidden, mode if turn else "default") for turn in range(3)][1:]
        ok = ok and all(forward <= 1 and backward == 0 for forward, backward in reads)
        figures.append(f"{case.name} {reads[-1][0]} + {reads[-1][1]}")
    return Result(name, ok, "reads forward + backward: " + ", ".join(figures))


def sync_debug(name: str, folder: str) -> Result:
    """See `host_reads`."""
    return host_reads(name, folder, mode="error")


def same_bits(name: str, folder: str, steps: int = 20) -> Result:
    """Losses and weights of two runs. Plain DeepSpeed first: where it differs, so may all others."""
    shape, _ = shape_here()
    world = dist.get_world_size()
    faults, rows = [], [Case("plain DeepSpeed", "deepspeed", world), *cases_on(world)]
    for case in rows:
        runs = []
        for _ in range(2):
            engine = make_engine(shape, case)
            runs.append((train(engine, shape, case, range(steps)), state(engine)))
            engine.destroy()
        (losses, weights), (again, weights_again) = runs
        if not losses.isfinite().all() or losses[0] == losses[-1]:
            faults.append(f"{case.name} does not train: losses {losses[0]:.4f} to {losses[-1]:.4f}")
        if fault := difference((losses, again), (weights, weights_again)):
            faults.append(f"{case.name}: {fault}")
    compared = f"{steps} steps twice of " + ", ".join(case.name for case in rows)
    return Result(name, not faults, "; ".join(faults) or compared)


def grouped_mm(name: str, folder: str) -> Result:
    """bf16 `grouped_mm` against fp32: rows with sentinels, and every dispatcher beside the unsharded experts."""
    shape, device = shape_here()
    errors = {"sentinels": layers.sentinel_error(shape, device)}
    ok = errors["sentinels"] <= BF16_ERROR
    for case in cases_on(dist.get_world_size()):
        own, got = layers.bf16_errors(shape, case, device)
        # Sums over ep in fp32 lose no more than sums in one process: 5% for chance, over thousands of entries. Over etp
        # each part of an expert's output is rounded before it is added, one rounding among those there are anyway.
        ok = ok and own <= BF16_ERROR and got <= (1.05 if case.etp == 1 else 1.5) * own
        errors |= {"unsharded": own, case.name: got}
    return Result(name, ok, "relative error: " + ", ".join(f"{key} {value:.1e}" for key, value in errors.items()))


def group_memory(name: str, folder: str) -> Result:
    """Memory of the device that communicators take, and that destroyed ones give back."""
    case = next(row for row in cases_on(dist.get_world_size()) if row.name == "alltoall")
    before, used, count = layers.memory_of_groups(case, rounds=4)
    (made, left), last = used[0], used[-1][1]
    more = (last - left) / (len(used) - 1)
    figure = f"{made - before} MiB for {count} groups, {left - before} kept, {more:.0f} more each further round"
    return Result(name, more <= LEFT, figure)


def resume(name: str, folder: str) -> Result:
    """Steps after a resume, bit by bit as in the run that was not interrupted."""
    shape, _ = shape_here()
    case = cases_on(dist.get_world_size())[-1]
    engine = make_engine(shape, case)
    train(engine, shape, case, range(3))
    engine.save_checkpoint(str(Path(folder) / "checkpoint"))
    losses, weights = train(engine, shape, case, range(3, 6)), state(engine)
    engine.destroy()
    engine = make_engine(shape, case)
    engine.load_checkpoint(str(Path(folder) / "checkpoint"))
    fault = difference((losses, train(engine, shape, case, range(3, 6))), (weights, state(engine)))
    engine.destroy()
    return Result(name, not fault, fault or f"3 steps after it, {case.name} (tp {case.tp} ep {case.ep} etp {case.etp})")


def times(name: str, folder: str, steps: int = 10) -> Result:
    """Seconds of a step: nothing split beside plain DeepSpeed, in turns; then every dispatcher."""
    shape, device = shape_here()
    world, clock = dist.get_world_size(), Clock(device)
    pair = [Case("plain DeepSpeed", "deepspeed", world), Case("nothing split", "ours", world)]
    found: dict[str, float] = {}
    for rows in (pair, *([case] for case in cases_on(world))):
        engines = [make_engine(shape, case) for case in rows]
        seconds: list[list[float]] = [[] for _ in rows]
        for step in range(steps + 3):
            for place, (engine, case) in enumerate(zip(engines, rows, strict=True)):
                once = range(step, step + 1)
                taken = clock.seconds(lambda engine=engine, case=case, once=once: train(engine, shape, case, once))
                seconds[place].append(taken)
        for engine, case, samples in zip(engines, rows, seconds, strict=True):
            found[case.name] = median(samples[3:])
            engine.destroy()
    ratio = found["nothing split"] / found["plain DeepSpeed"]
    figure = ", ".join(f"{key} {value * 1e3:.1f}" for key, value in found.items())
    # A CPU's times say nothing about GPUs: they are shown and not judged.
    most = SLOWER if device.type == "cuda" else math.inf
    return Result(name, ratio <= most, f"ms a step: {figure}; nothing split / plain {ratio:.2f}")


def overlap(name: str, folder: str) -> Result:
    """Shared experts while tokens travel: what share of the messages' time kernels run in, without and with."""
    shape, device = shape_here()
    world, found = dist.get_world_size(), []
    for on in (False, True):
        case = Case("", "ours", world, ep=world, dispatcher="alltoall", family="glm4_moe", overlap=on)
        engine = make_engine(shape, case)
        trace = Path(folder) / f"overlap-{'with' if on else 'without'}-rank{dist.get_rank()}.json"
        found.append(layers.hidden_share(engine, batch(shape, case, 0, device), trace))
        engine.destroy()
    (share, seconds), (with_share, with_seconds) = found
    ok = with_share >= share + HIDDEN and with_seconds <= SLOWER * seconds
    figure = f"hidden {share:.0%} without, {with_share:.0%} with; {seconds * 1e3:.1f} and {with_seconds * 1e3:.1f} ms"
    return Result(name, ok, figure)


@dataclass(frozen=True)
class Check:
    """A check, and what it takes: CUDA, and a number of ranks."""

    run: Callable[..., Result]
    cuda: bool = False
    ranks: int = 1


CHECKS = {
    "host reads": Check(host_reads),
    "sync debug": Check(sync_debug, cuda=True),
    "same bits": Check(same_bits),
    "grouped_mm": Check(grouped_mm),
    "group memory": Check(group_memory, cuda=True, ranks=2),
    "resume": Check(resume),
    "times": Check(times),
    "overlap": Check(overlap, cuda=True, ranks=2),
}


def missing(check: Check, world: int) -> str:
    """Why a check can't run here; empty where it can."""
    if check.cuda and not torch.cuda.is_available():
        return "no CUDA"
    return f"needs {check.ranks} GPUs" if world < check.ranks else ""


def run(name: str, folder: str, out: str = "", **options: Any) -> dict[str, Any]:
    """One check on this rank. `out`: where files that are to be kept go; `options`: the check's own."""
    return asdict(CHECKS[name].run(name, out or folder if name == "overlap" else folder, **options))


def merge(by_rank: list[dict[str, Any]]) -> Result:
    """What a check found on all ranks: the first that failed, or rank 0's."""
    results = [Result(**row) for row in by_rank]
    bad = next((rank for rank, result in enumerate(results) if not result.ok), None)
    return results[0] if bad is None else replace(results[bad], figure=f"rank {bad}: {results[bad].figure}")


def reason(error: LaunchFailed) -> str:
    """The line of a launch's log that names the error, or its last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (named or lines or ["failed"])[-1]


def main(world: int, out: Path) -> Iterator[Result]:
    """Every check's result, as it comes."""
    out.mkdir(parents=True, exist_ok=True)
    for name, check in CHECKS.items():
        if why := missing(check, world):
            yield Result(name, None, why)
            continue
        try:
            yield merge(torchrun.run(world, "benchmarks.node_checks:run", name=name, out=str(out)))
        except LaunchFailed as error:
            (out / f"check-{name.replace(' ', '-')}.log").write_text(str(error), encoding="utf-8")
            yield Result(name, False, reason(error))


def show(world: int, out: Path) -> int:
    """Prints every check's line. The exit status: 1 where one failed."""
    results = []
    for result in main(world, out):
        print(result.line(), flush=True)
        results.append(result)
    failed = sum(result.ok is False for result in results)
    skipped = sum(result.ok is None for result in results)
    print(f"{len(results) - failed - skipped} ok, {failed} FAIL, {skipped} skipped; traces and logs in {out}")
    return 1 if failed else 0
