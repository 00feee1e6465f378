"""`ds-etp plan`: the planner's layouts ranked, explained, drawn, and written as a DeepSpeed config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ds_etp.errors import ConfigError
from ds_etp.log import console_for_tables
from ds_etp.planner.advice import explain
from ds_etp.planner.configs import read_facts
from ds_etp.planner.hardware import Hardware, check_hardware, parse_bytes, with_links
from ds_etp.planner.model import ModelFacts
from ds_etp.planner.ranking import ZERO_STAGES, Proposal, ds_config, rank_layouts, script_notes
from ds_etp.planner.timing import EXCHANGES

_SIZES = "up to one (4), or a list (1,4; or 4, for that alone); default 1"
# Of the tables where the output is no terminal.
_PIPED_WIDTH = 120


def add_plan(commands: Any, size: Callable[[str], int]) -> None:
    """Adds the subcommand to an argparse's subparsers; `size` reads a whole number of at least 1."""
    plan = commands.add_parser("plan", help="rank the layouts of a model by memory, communication and time")
    plan.add_argument("--model", required=True, help="config.json, a folder with one, or a model's id on the hub")
    plan.add_argument("--gpus", type=size, required=True, help="number of ranks the job will have")
    plan.add_argument("--memory", default="80GB", help="of one GPU (default 80GB)")
    plan.add_argument("--nodes", type=size, help="number of machines (default: of 8 GPUs each)")
    plan.add_argument("--seq", type=size, default=4096, help="tokens of a sequence (default 4096)")
    plan.add_argument("--micro-batch", type=size, default=1, help="sequences of a rank's batch (default 1)")
    plan.add_argument("--cp", type=_sizes, default=(1,), help=f"context parallel (Ulysses) sizes: {_SIZES}")
    plan.add_argument("--pp", type=_sizes, default=(1,), help=f"pipeline parallel sizes: {_SIZES}")
    plan.add_argument(
        "--accumulate", type=size, help="micro batches of a step (default 1, with pipelines 4 for each stage of --pp)"
    )
    plan.add_argument("--zero", type=int, choices=ZERO_STAGES, help="ZeRO stage (default: all are tried)")
    plan.add_argument(
        "--link", default="intra=450GB,inter=50GB", help="bytes a second a GPU sends in and out of a node"
    )
    plan.add_argument("--tflops", type=float, default=600.0, help="of a large bf16 matrix product (default 600)")
    plan.add_argument("--no-recompute", action="store_true", help="without activation checkpointing")
    plan.add_argument("--exact", action="store_true", help="count the model itself, which needs torch, not its config")
    plan.add_argument("--top", type=size, default=10, help="rows of the table (default 10)")
    plan.add_argument("--choose", type=size, default=1, help="the row to explain and to write (default 1)")
    plan.add_argument("--chart", type=Path, help="picture file to draw the rows of the table in; needs matplotlib")
    plan.add_argument("--write", type=Path, help="file to write the chosen layout's DeepSpeed config to")
    plan.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Prints the ranked layouts. Exit code 1 where no layout fits, so that scripts see it.

    Raises:
        ConfigError: a model that can't be counted, machines that can't be, or a row that isn't there.
    """
    hardware = _hardware(args)
    facts = _facts(args.model, exact=args.exact)
    proposals = rank_layouts(
        facts,
        hardware,
        sequence=args.seq,
        micro_batch=args.micro_batch,
        zero_stages=ZERO_STAGES if args.zero is None else (args.zero,),
        recompute=not args.no_recompute,
        micro_batches=args.accumulate or _micro_batches(args.pp, args.gpus),
        cp=args.cp,
        pp=args.pp,
    )
    if args.choose > len(proposals):
        raise ConfigError(f"--choose {args.choose}: there are {len(proposals)} layouts.")
    shown, chosen = proposals[: args.top], proposals[args.choose - 1]
    asked = ["tp", *(axis for axis in ("cp", "pp") if max(getattr(args, axis)) > 1)]
    console = console_for_tables(_PIPED_WIDTH)
    console.print(_ranked(facts, hardware, proposals, shown))
    console.print(_memory(chosen, args.choose))
    console.print(_time(chosen, hardware, args.choose))
    for sentence in [*explain(facts, hardware, proposals, asked), *script_notes(chosen)]:
        console.print(f"- {sentence}")
    if args.chart:
        from ds_etp.cli.plan_chart import draw

        draw(args.chart, facts, hardware, shown)
        console.print(f"drawn: {args.chart}")
    if args.write:
        args.write.write_text(json.dumps(ds_config(chosen), indent=2) + "\n", encoding="utf-8")
        axes = "".join(f" --{axis} {size}" for axis, size in chosen.script_axes.items())
        check = f"ds-etp check {args.write} --gpus {args.gpus}{axes} --model {args.model}"
        console.print(f"written: {args.write}, {chosen.sizes}. Check it: {check}", soft_wrap=True)
    return 0 if chosen.fits else 1


def _sizes(text: str) -> Sequence[int]:
    """`4` as 1 to 4, `1,4` as those two, `4,` as 4 alone."""
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no size and no list of sizes of at least 1: 4, or 1,4")
    return range(1, int(text) + 1) if "," not in text else tuple(map(int, parts))


def _micro_batches(pp: Sequence[int], gpus: int) -> int:
    """4 for each stage of the deepest pipeline, so that filling it takes a fifth of the time; 1 without one."""
    deepest = max((size for size in pp if gpus % size == 0), default=1)
    return 4 * deepest if deepest > 1 else 1


def _hardware(args: argparse.Namespace) -> Hardware:
    if args.nodes and args.gpus % args.nodes:
        raise ConfigError(f"--nodes {args.nodes} does not divide {args.gpus} GPUs.")
    per_node = args.gpus // args.nodes if args.nodes else min(8, args.gpus)
    hardware = Hardware(args.gpus, per_node, parse_bytes(args.memory, "--memory"))
    hardware = replace(with_links(hardware, args.link), flops=args.tflops * 1e12)
    check_hardware(hardware)
    return hardware


def _facts(model: str, *, exact: bool) -> ModelFacts:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    name = path.parent.name if path.name == "config.json" else path.stem
    if not path.is_file():
        path, name = _from_hub(model), model.rpartition("/")[2]
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} does not hold a JSON object.")
    if exact:
        from ds_etp.patches.transformers.model_facts import count_model

        return count_model(values, str(path), name)
    return read_facts(values, str(path), name)


def _from_hub(model: str) -> Path:
    """The config of a model by its id."""
    if model.count("/") != 1 or model.startswith(("/", ".")) or model.endswith((".json", "/")):
        raise ConfigError(f"--model {model}: no such file or folder with a config.json.")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # its many kinds of network and access errors are of no use to a planner
        raise ConfigError(f"--model {model}: its config.json can't be had from the hub ({error}).") from None


def _ranked(facts: ModelFacts, hardware: Hardware, proposals: Sequence[Proposal], shown: Sequence[Proposal]) -> Table:
    fitting = sum(proposal.fits for proposal in proposals)
    title = (
        f"{facts.name}: {facts.parameters / 1e9:,.1f}B parameters, {facts.active_parameters / 1e9:,.1f}B of them a "
        f"token, on {hardware.gpus} GPUs, {hardware.per_node} a node. {len(proposals)} layouts, {fitting} fit"
    )
    micro = shown[0].job.micro_batches
    title += f". {micro} micro batches a step" if micro > 1 else ""
    # Only where one of the two was asked for, and works.
    axes = [axis for axis in ("cp", "pp") if any(axis in proposal.script_axes for proposal in proposals)]
    names = (
        "",
        "tp",
        *axes,
        "etp",
        "ep",
        "edp",
        "ZeRO",
        "dispatcher",
        "GB",
        "fits",
        "rows sent",
        "GB sent",
        "s",
        "tokens/s",
    )
    table = Table(*names, "columns", title=title, title_justify="left", padding=(0, 0))
    for place, proposal in enumerate(shown, 1):
        topology, timing = proposal.topology, proposal.timing
        columns = f"{facts.columns // topology.etp}{'' if proposal.aligned else ' (no grouped_mm)'}"
        table.add_row(
            str(place),
            *(str(getattr(topology, axis)) for axis in ("tp", *axes, "etp", "ep", "edp")),
            str(proposal.job.zero_stage),
            proposal.choice.dispatcher,
            f"{proposal.memory.peak / 1e9:.1f}",
            "yes" if proposal.fits else "no",
            f"{timing.rows:,.0f}",
            f"{timing.bytes / 1e9:,.2f}",
            f"{timing.seconds:.2f}",
            f"{timing.rate:,.0f}",
            columns,
        )
    return table


def _memory(chosen: Proposal, place: int) -> Table:
    title = f"Memory of a rank in layout {place}: {chosen.sizes}"
    if chosen.topology.pp > 1:
        title += f". The fullest stage is {chosen.memory.pipeline_stage} of 0 to {chosen.topology.pp - 1}, with "
        title += f"{chosen.memory.layers} layers"
    table = Table("GB", "what", "why", title=title, title_justify="left")
    for line in chosen.memory.lines:
        when = {"always": "", "backward": " (in backward)", "step": " (in the step)"}[line.phase]
        table.add_row(f"{line.bytes / 1e9:.2f}", line.name + when, line.why)
    table.add_row(f"{chosen.memory.peak / 1e9:.2f}", "peak", "always, and the larger of backward and step")
    return table


def _time(chosen: Proposal, hardware: Hardware, place: int) -> Table:
    timing, topology, micro = chosen.timing, chosen.topology, chosen.job.micro_batches
    title = f"Time of a step of {timing.tokens:,} tokens in layout {place}, an estimate: nothing overlaps"
    if topology.pp > 1:
        title += f". The slowest stage is {timing.pipeline_stage} of 0 to {topology.pp - 1}"
    table = Table("s", "what", "why", title=title, title_justify="left")
    rate = f"{hardware.flops / 1e12:.0f} TFLOP/s"
    links = f"{hardware.intra / 1e9:.0f} GB/s in a node, {hardware.inter / 1e9:.0f} GB/s out of it"
    rows: list[tuple[float, str, str]] = [
        (timing.dense, "attention, dense layers", f"at {rate}"),
        (timing.experts, "experts", f"at {timing.expert_efficiency:.0%} of {rate}: 128 x 128 tiles, reading weights"),
        (
            timing.dispatch,
            "tokens to experts and back",
            f"{timing.rows:,.0f} rows a rank, {chosen.choice.dispatcher}; {links}",
        ),
        (timing.attention, "AutoTP", "an all-reduce for each split decoder block, and the logits"),
    ]
    if topology.cp > 1:
        why = f"{EXCHANGES} all-to-alls a layer and direction over cp {topology.cp}: queries, keys, values, result"
        rows.append((timing.context, "Ulysses", why))
    if topology.pp > 1:
        rows += [
            (timing.pipe, "pipeline messages", f"T x H to the next stage, their gradient back, {micro} times"),
            (
                timing.bubble,
                "pipeline bubble",
                f"(pp - 1) / (micro batches + pp - 1) = {topology.pp - 1} / {micro + topology.pp - 1} of the time "
                "without data parallel: stages wait as it fills and empties",
            ),
        ]
    shared = f"dp {topology.dp}" if topology.cp == 1 else f"dp x cp {topology.dp * topology.cp}"
    rows += [
        (timing.data, "data parallel", f"gradients and weights, over {shared} and edp {topology.edp}"),
        (timing.seconds, "step", f"{timing.rate:,.0f} tokens a second, {timing.rate / hardware.gpus:,.0f} a GPU"),
    ]
    for seconds, what, why in rows:
        table.add_row(f"{seconds:.3f}", what, why)
    return table
