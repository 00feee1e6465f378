"""What cases that were run beside each other come to, as sections of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.cases import SHAPES, Target, message_targets, targets
from benchmarks.runs import Key, Samples, ratio, typical
from benchmarks.tables import MB, table


def _verdict(value: float, most: float | None) -> str:
    return "" if most is None else f"at most {most}: {'met' if value <= most else 'missed'}"


def times(samples: dict[Key, Samples]) -> str:
    """Every case's times, and their ratios to those of its peer."""
    rows, tokens = [], {shape.name: shape.tokens for shape in SHAPES}
    for (shape, case), row in samples.items():
        if row.error or not row.step:
            rows.append((shape, case.environment, case.name, row.error or "not run", *[""] * 7))
            continue
        passes, whole = typical(row.forward_backward), typical(row.step)
        peak = f"{row.cuda_peak / MB:.1f}" if row.cuda_peak else ""
        rows.append(
            (
                shape,
                case.environment,
                case.name + (f" ({row.dispatcher})" if row.dispatcher else ""),
                f"{passes * 1e3:.0f}",
                f"{typical(row.processor) * 1e3:.0f}",
                f"{whole * 1e3:.0f}",
                f"{max(whole - passes, 0) / whole:.0%}",
                f"{tokens.get(shape, 0) / whole:,.0f}" if shape in tokens else "",
                f"{row.messages:.0f}",
                f"{row.bytes / MB:.2f}",
                peak,
            )
        )
    header = (
        "model",
        "environment",
        "case",
        "forward + backward, ms",
        "CPU time of it, all ranks, ms",
        "whole step, ms",
        "share of reduction and optimizer",
        "tokens/s",
        "messages a MoE layer",
        "MB sent a MoE layer",
        "peak on the GPU, MB",
    )
    rounds = max((len(row.step) for row in samples.values()), default=0)
    return "\n\n".join(
        [
            "## Time of a step",
            f"{rounds} launches of each case. Those of one environment run side by side and take turns, step by step. "
            "The slowest rank of each step counts, then the median over steps, then over launches. Forward + backward "
            "is without the reduction of gradients. Messages and bytes are recorded, of one MoE block, forward and "
            "backward, sent by one rank (mean). CPU time hardly depends on what else the machine does; the others do, "
            "see the load average.",
            table(header, rows),
            "Ratios of steps that follow each other, medians over steps, then launches, and what the project aims at:",
            _ratios(samples),
        ]
    )


def _find(samples: dict[Key, Samples], shape: str, environment: str, name: str) -> Samples:
    """A case's samples; none of one that has not run."""
    for (of, case), row in samples.items():
        if (of, case.environment, case.name) == (shape, environment, name):
            return row
    return Samples()


def _pairs(samples: dict[Key, Samples], aims: Sequence[Target]) -> Iterator[tuple[str, Target, Samples, Samples]]:
    """For every shape and target the case's samples and its peer's."""
    for shape in dict.fromkeys(shape for shape, _ in samples):
        for target in aims:
            own, peer = (_find(samples, shape, target.environment, name) for name in (target.case, target.peer))
            yield shape, target, own, peer


_WORDS = {"forward_backward": "forward + backward", "processor": "its CPU time", "step": "whole step"}


def _ratios(samples: dict[Key, Samples]) -> str:
    rows = []
    for shape, target, own, peer in _pairs(samples, targets()):
        values = {of: ratio(own, peer, of) for of in _WORDS}
        aimed = values[target.of]
        if aimed is None:
            continue
        met = _verdict(aimed, target.most.get(shape))
        met = met and f"{_WORDS[target.of]} {met}"
        rows.append((shape, target.case, target.peer, *(f"{value:.2f}" for value in values.values()), met))
    return table(("model", "case", "beside", *_WORDS.values(), "aim"), rows)


def messages(samples: dict[Key, Samples]) -> str:
    """Every case's messages and bytes, and their ratios to those of its peer."""
    rows = [
        (
            shape,
            case.environment,
            f"{case.name}: tp {case.tp}, etp {case.etp}, ep {case.ep} on {case.world} ranks",
            *([row.error, ""] if row.error else [f"{row.messages:.0f}", f"{row.bytes / MB:.2f}"]),
        )
        for (shape, case), row in samples.items()
    ]
    compared = []
    for shape, target, own, peer in _pairs(samples, message_targets()):
        if not (own.bytes and peer.bytes):
            continue
        share = own.bytes / peer.bytes
        met = _verdict(share, target.most.get(shape)) + target.note
        compared.append(
            (shape, target.case, target.peer, f"{own.messages:.0f} / {peer.messages:.0f}", f"{share:.3f}", met)
        )
    return "\n\n".join(
        [
            "## Messages",
            "Recorded, of one MoE block, forward and backward, sent by one rank (mean). Weights are the same, and "
            "batches too where there are as many: so is the routing.",
            table(("model", "environment", "case", "messages", "MB"), rows),
            table(("model", "case", "beside", "messages", "bytes, share of its", "aim"), compared),
        ]
    )


def dispatchers(samples: dict[Key, Samples]) -> str:
    """The dispatcher that `auto` takes beside the fastest of those named."""
    rows = []
    layouts = dict.fromkeys((shape, case.name.split(":")[0]) for shape, case in samples)
    for shape, layout in layouts:
        own = {
            case.dispatcher: row
            for (of, case), row in samples.items()
            if of == shape and case.name.startswith(f"{layout}:") and row.step
        }
        named = [dispatcher for dispatcher in own if dispatcher != "auto"]
        taken = next(
            (
                dispatcher
                for dispatcher in named
                if "auto" in own and own[dispatcher].dispatcher == own["auto"].dispatcher
            ),
            None,
        )
        if taken is None:
            continue
        best = min(named, key=lambda dispatcher: typical(own[dispatcher].forward_backward))
        times = ", ".join(f"{dispatcher} {typical(row.forward_backward) * 1e3:.0f}" for dispatcher, row in own.items())
        shares = [f"{ratio(own[one], own[other]):.2f}" for one, other in ((taken, best), ("auto", taken))]
        rows.append((shape, layout, taken, best, *shares, times))
    header = (
        "model",
        "layout",
        "auto took",
        "fastest",
        "taken / fastest (aim: at most 1.05)",
        "auto / the same dispatcher, named",
        "ms, forward + backward",
    )
    return (
        "## Dispatchers\n\nWhat `auto` runs is the dispatcher it took: launches of both, side by side, show how far "
        " launches of one program differ.\n\n" + table(header, rows)
    )


def overlap(samples: dict[Key, Samples]) -> str:
    """With `overlap` beside without."""
    rows = []
    for (shape, case), on in samples.items():
        if not case.overlap:
            continue
        off = samples[shape, replace(case, name=case.name.replace("with", "without"), overlap=False)]
        if on.error or off.error:
            rows.append((shape, case.name.split(":")[0], on.error or off.error, *[""] * 4))
            continue
        ratios = [ratio(on, off, of) or 0.0 for of in ("forward_backward", "processor", "step")]
        same = "yes" if (on.messages, on.bytes) == (off.messages, off.bytes) else "no"
        rows.append((shape, case.name.split(":")[0], on.dispatcher, *[f"{value:.2f}" for value in ratios], same))
    header = ("model", "layout", "dispatcher", "forward + backward", "its CPU time", "whole step", "same messages")
    return (
        "## Overlap\n\nGLM-4-MoE, whose blocks have a shared expert: time with `overlap` / without, of steps that "
        "follow each other, medians; and whether as many messages and bytes are sent.\n\n" + table(header, rows)
    )
