"""What ds_etp says, on rank 0, whatever DeepSpeed's own log level is (it is WARNING by default)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def logger() -> logging.Logger:
    """The package's logger. It shows INFO unless the application has set it up otherwise."""
    log = logging.getLogger("ds_etp")
    if log.level == logging.NOTSET and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[ds_etp] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


def console_for_tables(width: int) -> Console:
    """A console as wide as the terminal, or `width` where there is none: rich would take it to be 80 wide."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def log_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Logs rows of (name, value) as one table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    logger().info("%s", capture.get().rstrip())
