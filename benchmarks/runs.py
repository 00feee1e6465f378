"""Interleaved launches of all cases, and what they come to: medians, and ratios of steps that follow each other.

Cases of one environment run side by side and take turns, step by step: what else the machine does weighs on all of them
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.cases import Case, Shape, as_json
from benchmarks.pool import Launch, LaunchFailed

Run = Callable[..., list[Any]]
Together = Callable[[list[Launch]], list[Any]]
MOST_AT_ONCE = 7  # launches that a machine has memory for


@dataclass
class Samples:
    """A case's launches; `error` where it can't run.

    Attributes:
        forward_backward, step: seconds of the slowest rank, by launch and step.
        processor: CPU seconds of forward and backward, of all ranks together, by launch and step.
        messages, bytes: of one MoE block, forward and backward, mean over ranks and layers.
        dispatcher: of ours.
        cuda_peak: bytes, on a GPU.
    """

    forward_backward: list[list[float]] = field(default_factory=list)
    step: list[list[float]] = field(default_factory=list)
    processor: list[list[float]] = field(default_factory=list)
    messages: float = 0.0
    bytes: float = 0.0
    dispatcher: str = ""
    cuda_peak: int = 0
    error: str = ""


Key = tuple[str, Case]  # a shape's name, and a case


def interleaved(
    launchers: dict[str, Together], shapes: Iterable[Shape], cases: Iterable[Case], rounds: int, steps: int
) -> dict[Key, Samples]:
    """Every case once a round; the slowest rank's time counts.

    Args:
        launchers: by environment; cases of others are left out.
        rounds, steps: launches of each case, and timed steps of each launch.
    """
    order = [(shape, case) for shape in shapes for case in cases if case.environment in launchers]
    samples = {(shape.name, case): Samples() for shape, case in order}
    for number in range(rounds):
        for shape, environment in dict.fromkeys((shape, case.environment) for shape, case in order):
            able = [key for key, row in samples.items() if not row.error]
            own = [case for of, case in able if (of, case.environment) == (shape.name, environment)]
            for first in range(0, len(own), MOST_AT_ONCE):
                chosen = own[first : first + MOST_AT_ONCE]
                results = launchers[environment]([_launch(shape, case, steps) for case in chosen])
                for case, by_rank in zip(chosen, results, strict=True):
                    said = _add(samples[shape.name, case], by_rank)
                    where = f"round {number + 1} of {rounds}: {shape.name}, {case.name} ({environment})"
                    print(f"{where}: {said}", flush=True)
    return samples


def _launch(shape: Shape, case: Case, steps: int) -> Launch:
    arguments = {"shape": as_json(shape), "case": as_json(case), "steps": steps}
    return Launch(case.world, "benchmarks.timing:timed", arguments)


def _add(row: Samples, by_rank: list[Any] | LaunchFailed) -> str:
    """Takes one launch of a case, and sums it up."""
    if isinstance(by_rank, LaunchFailed):
        row.error = str(by_rank).strip().splitlines()[-1]
        return row.error
    for name in ("forward_backward", "step"):
        getattr(row, name).append([max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)])
    row.processor.append([sum(times) for times in zip(*(rank["processor"] for rank in by_rank), strict=True)])
    row.messages = mean(layer for rank in by_rank for layer in rank["messages"])
    row.bytes = mean(layer for rank in by_rank for layer in rank["bytes"])
    row.dispatcher, row.cuda_peak = by_rank[0]["dispatcher"], max(rank["peak"] for rank in by_rank)
    wall, processor = median(row.forward_backward[-1]) * 1e3, median(row.processor[-1]) * 1e3
    return f"forward + backward {wall:.0f} ms, CPU time {processor:.0f} ms"


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    items = list(values)
    return sum(items) / len(items) if items else 0.0


def typical(launches: Iterable[Iterable[float]]) -> float:
    """The median over launches of the medians over their steps."""
    return median(map(median, launches))


def ratio(case: Samples, peer: Samples, name: str = "forward_backward") -> float | None:
    """The median over launches of the median over steps of case / peer; None where either has not run."""
    launches = zip(getattr(case, name), getattr(peer, name), strict=False)
    pairs = [list(zip(own, other, strict=False)) for own, other in launches]
    return typical([own / other for own, other in steps] for steps in pairs) if pairs else None


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
