"""The `ds-etp` command. Runs on any machine: no GPU; no torch and no DeepSpeed but for
`export`, `import` and `check --model`.

A subcommand is one function, added in `make_parser`; whatever only it needs is imported inside it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_etp.activation import request
from ds_etp.cli.plan import add_plan
from ds_etp.cli.report import add_report
from ds_etp.config.block import ExpertTensorParallelConfig, check_dispatcher, layout_table, parse_block, resolve
from ds_etp.config.deepspeed import BLOCK, autotp_size, half_dtype, zero_stage
from ds_etp.config.dense_rules import check_axes
from ds_etp.config.file import read_config_file
from ds_etp.config.host_rules import check_host_options
from ds_etp.config.optimizers import check_optimizer_name
from ds_etp.errors import CheckpointError, ConfigError
from ds_etp.log import console_for_tables
from ds_etp.parallel.topology import GroupKind, Topology

AXES: tuple[tuple[str, GroupKind], ...] = (  # column -> the kind of group a rank's place along it is its place in
    ("tp", "tp"),
    ("cp", "cp"),
    ("dp", "dp"),
    ("pp", "pp"),
    ("etp", "expt_tp"),
    ("ep", "ep"),
    ("edp", "expert_dp"),
)
WIDTH = 160  # of tables of paths and shapes, where nobody's terminal says how wide it is
LISTED: tuple[GroupKind, ...] = ("tp", "cp", "dp", "pp", "expt_tp", "ep", "expert_dp", "expert_model_parallel")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        Exit code: 0, or 2 with a message on stderr when the sizes, the config or the checkpoint cannot work.
    """
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except (ConfigError, CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return code


def make_parser() -> argparse.ArgumentParser:
    """The command line: a subcommand sets `run`, a function of the parsed arguments that returns the exit code."""
    parser = argparse.ArgumentParser(prog="ds-etp", description="Expert tensor parallelism for DeepSpeed: layouts.")
    commands = parser.add_subparsers(required=True, metavar="command")

    topology = commands.add_parser("topology", help="print every rank's place and the groups of a layout")
    topology.add_argument("--world", type=_size, required=True, help="number of ranks")
    topology.add_argument("--tp", type=_size, default=1, help="tensor parallel size of the dense path (default 1)")
    topology.add_argument("--cp", type=_size, default=1, help="context (Ulysses) parallel size (default 1)")
    topology.add_argument("--pp", type=_size, default=1, help="pipeline parallel size (default 1)")
    topology.add_argument("--etp", type=_size, help="expert tensor parallel size (default: tp)")
    topology.add_argument("--ep", type=_size, default=1, help="expert parallel size (default 1)")
    topology.add_argument("--svg", type=Path, help="file to draw the layout in")
    topology.add_argument("--per-node", type=_size, default=8, help="ranks of a node, for the picture (default 8)")
    topology.set_defaults(run=_topology)

    check = commands.add_parser("check", help="check a DeepSpeed config file and print the layout it gives")
    check.add_argument("config", type=Path, help="the DeepSpeed JSON config")
    check.add_argument("--gpus", type=_size, required=True, help="number of ranks the job will have")
    check.add_argument("--cp", type=_size, default=1, help="context (Ulysses) parallel size (default 1)")
    check.add_argument("--pp", type=_size, default=1, help="pipeline parallel size (default 1)")
    check.add_argument("--model", help="also check this model: a folder with config.json, that file, or a hub id")
    check.add_argument(
        "--gpus-per-node", type=_size, help="with --model, for the choice of a dispatcher (default: one node)"
    )
    check.add_argument("--experts-implementation", help="what the model is loaded with (default: transformers' choice)")
    check.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    check.set_defaults(run=_check)

    run = commands.add_parser("run", help="run any command with ds_etp registered in all processes it starts")
    run.add_argument("command", nargs=argparse.REMAINDER, help="such as: -- llamafactory-cli train config.yaml")
    run.set_defaults(run=_run)

    export = commands.add_parser("export", help="write a checkpoint's model as a folder that from_pretrained loads")
    export.add_argument("checkpoint", type=Path, help="folder of a checkpoint, of one of its tags, or of a Trainer's")
    export.add_argument("out", type=Path, help="folder to write")
    export.add_argument("--dtype", help="bf16, fp16 or fp32 (default: what the model computed in)")
    export.add_argument("--config", type=Path, help="folder with config.json, where the checkpoint has none")
    export.add_argument("--max-shard-size", default="5GB", help="of one weights file (default 5GB)")
    export.set_defaults(run=_export)

    importing = commands.add_parser(
        "import", help="turn plain DeepSpeed's checkpoint into one that loads in any layout"
    )
    importing.add_argument("source", type=Path, help="folder of a checkpoint that DeepSpeed wrote, or of a tag")
    importing.add_argument("directory", type=Path, help="folder to write the tag in; may be the same")
    importing.add_argument("--tag", help="which tag of the source (default: the one that `latest` names)")
    importing.add_argument(
        "--trust-pickle", action="store_true", help="let the files run code, if they hold objects that need it"
    )
    importing.set_defaults(run=_import)

    add_plan(commands, _size)
    add_report(commands)
    return parser


def _size(text: str) -> int:
    """A parallel size from the command line; argparse words the error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: a whole number of at least 1 is needed")
    return int(text)


def _topology(args: argparse.Namespace) -> int:
    block = ExpertTensorParallelConfig(etp_size="auto" if args.etp is None else args.etp, ep_size=args.ep)
    topology = resolve(block, world=args.world, tp=args.tp, cp=args.cp, pp=args.pp)
    console = Console(highlight=False)
    layout = layout_table(topology, block)[:-1]  # no dispatcher without a config
    console.print(_table("Layout", ("size", "value"), layout))
    places = {kind: _places(topology, kind) for _, kind in AXES}
    rows = [(str(rank), *(str(places[kind][rank]) for _, kind in AXES)) for rank in range(topology.world)]
    console.print(_table("Ranks", ("rank", *(name for name, _ in AXES)), rows))
    groups = [(kind, " ".join(_braces(group) for group in topology.groups(kind))) for kind in LISTED]
    console.print(_table("Groups", ("kind", "ranks"), groups))
    if args.svg:
        from ds_etp.cli.topology_svg import draw_topology

        args.svg.write_text(draw_topology(topology, args.per_node), encoding="utf-8")
        console.print(f"drawn: {args.svg}")
    return 0


def _run(args: argparse.Namespace) -> int:
    """Becomes the command: signals, exit code and terminal are its own."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("ds-etp run: no command is given. For example: ds-etp run -- accelerate launch train.py")
    request()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise ConfigError(f"ds-etp run: {command[0]} can't be started: {error.strerror}") from None


def _check(args: argparse.Namespace) -> int:
    ds_config = read_config_file(args.config)
    block = parse_block(ds_config)
    if block is None:
        if BLOCK not in ds_config:
            raise ConfigError(
                f'{args.config} has no "{BLOCK}" block: ds_etp would change nothing. Add "{BLOCK}": {{}}.'
            )
        print(f"{args.config}: {BLOCK} is not enabled, ds_etp changes nothing.")
        return 0
    check_host_options(ds_config, args.gpus)
    topology = resolve(block, world=args.gpus, tp=autotp_size(ds_config), cp=args.cp, pp=args.pp)
    check_dispatcher(block, topology)
    check_axes(topology, zero_stage(ds_config), half_dtype(ds_config))
    check_optimizer_name(ds_config, block, topology)
    if args.model is not None:
        return _check_model(args, ds_config, topology, block)
    Console(highlight=False).print(_table("Layout", ("size", "value"), layout_table(topology, block)))
    return 0


def _check_model(
    args: argparse.Namespace, ds_config: Mapping[str, object], topology: Topology, block: ExpertTensorParallelConfig
) -> int:
    logging.disable(logging.WARNING)  # DeepSpeed warns, when imported, that it found no GPU: none is needed here
    try:
        from ds_etp.cli.check_model import check_dense_plan, inspect
        from ds_etp.cli.check_report import report
        from ds_etp.experts.checks import dispatcher_rows
    finally:
        logging.disable(logging.NOTSET)
    facts = inspect(
        args.model,
        topology,
        block,
        ds_config,
        ranks_per_node=args.gpus_per_node,
        trust_remote_code=args.trust_remote_code,
        implementation=args.experts_implementation,
    )
    console = console_for_tables(WIDTH)
    # The last row of the layout is the dispatcher as asked for; here it is the one that is taken.
    layout = [*layout_table(topology, block)[:-1], *dispatcher_rows(facts.choices, block)]
    for part in (_table("Layout", ("size", "value"), layout), *report(facts, topology)):
        console.print(part)
    check_dense_plan(facts, topology)
    return 0


def _export(args: argparse.Namespace) -> int:
    from ds_etp.checkpoint.export_api import export_checkpoint

    files = export_checkpoint(
        args.checkpoint, args.out, dtype=args.dtype, config=args.config, max_shard_size=args.max_shard_size
    )
    rows = [(name, f"{(args.out / name).stat().st_size:,}") for name in files]
    Console(highlight=False).print(_table(str(args.out), ("file", "bytes"), rows))
    return 0


def _import(args: argparse.Namespace) -> int:
    from ds_etp.checkpoint.deepspeed_import import import_checkpoint

    folder = import_checkpoint(args.source, args.directory, tag=args.tag, trust_pickle=args.trust_pickle)
    print(f"{folder}: load_checkpoint({str(folder.parent)!r}) reads it in any layout")
    return 0


def _places(topology: Topology, kind: GroupKind) -> dict[int, int]:
    """rank -> its place in its group of one kind."""
    return {rank: place for group in topology.groups(kind) for place, rank in enumerate(group)}


def _braces(ranks: tuple[int, ...]) -> str:
    """`{0,2}`, or `{0..3}` for three or more ranks in a row."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{{{ranks[0]}..{ranks[-1]}}}"
    return "{" + ",".join(map(str, ranks)) + "}"


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*names, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
