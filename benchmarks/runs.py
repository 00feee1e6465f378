"""Interleaved launches of all cases, and what they come to: medians, and ratios of cases of one round.

Launches of one round follow each other closely, so what else the machine does weighs on all of them alike; a
ratio is the median over rounds of the ratios within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.cases import Case, Shape, as_json

Run = Callable[..., list[Any]]


@dataclass
class Samples:
    """A case's launches, by round; `error` where it can't run.

    Attributes:
        forward_backward, step: seconds of the slowest rank.
        processor: CPU seconds of forward and backward, of all ranks together.
        messages, bytes: of one MoE block, forward and backward, mean over ranks and layers.
        plan: of ours.
        cuda_peak: bytes, on a GPU.
    """

    forward_backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    messages: float = 0.0
    bytes: float = 0.0
    plan: str = ""
    cuda_peak: int = 0
    error: str = ""


Key = tuple[str, Case]  # a shape's name, and a case


def interleaved(
    launchers: dict[str, Run], shapes: Iterable[Shape], cases: Iterable[Case], rounds: int, steps: int
) -> dict[Key, Samples]:
    """Every case once a round; the slowest rank's time counts.

    Args:
        launchers: by environment, `run(world, function, **arguments)`; cases of others are left out.
        rounds, steps: launches of each case, and timed steps of each launch.
    """
    order = [(shape, case) for shape in shapes for case in cases if case.environment in launchers]
    samples = {(shape.name, case): Samples() for shape, case in order}
    for number in range(rounds):
        for shape, case in order:
            row = samples[shape.name, case]
            if row.error:
                continue
            where = f"round {number + 1} of {rounds}: {shape.name}, {case.name} ({case.environment})"
            try:
                by_rank = launchers[case.environment](
                    case.world, "benchmarks.timing:timed", shape=as_json(shape), case=as_json(case), steps=steps
                )
            except RuntimeError as error:
                row.error = str(error).strip().splitlines()[-1]
                print(f"{where}: {row.error}", flush=True)
                continue
            for name in ("forward_backward", "step"):
                slowest = [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)]
                getattr(row, name).append(median(slowest))
            row.processor.append(median(map(sum, zip(*(rank["processor"] for rank in by_rank), strict=True))))
            wall, processor = row.forward_backward[-1] * 1e3, row.processor[-1] * 1e3
            print(f"{where}: forward + backward {wall:.0f} ms, CPU time {processor:.0f} ms", flush=True)
            row.messages = mean(layer for rank in by_rank for layer in rank["messages"])
            row.bytes = mean(layer for rank in by_rank for layer in rank["bytes"])
            row.plan, row.cuda_peak = by_rank[0]["plan"], max(rank["peak"] for rank in by_rank)
    return samples


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    items = list(values)
    return sum(items) / len(items) if items else 0.0


def ratio(case: Samples, peer: Samples, name: str = "forward_backward") -> float | None:
    """The median over rounds of case / peer; None where either has not run."""
    pairs = list(zip(getattr(case, name), getattr(peer, name), strict=False))
    return median(own / other for own, other in pairs) if pairs else None


def peaks(launchers: dict[str, Run], shape: Shape, cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Peak memory and its parts, of the rank that has most, in a launch of its own for each case."""
    rows = []
    for case in cases:
        if case.environment not in launchers:
            continue
        try:
            by_rank = launchers[case.environment](
                case.world, "benchmarks.memory:measured", shape=as_json(shape), case=as_json(case)
            )
        except RuntimeError as error:
            rows.append({"case": case, "error": str(error).strip().splitlines()[-1]})
            continue
        rows.append({"case": case, **max(by_rank, key=lambda rank: rank["peak"])})
    return rows
