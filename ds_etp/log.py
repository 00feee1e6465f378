"""What ds_etp says, on rank 0, whatever DeepSpeed's own log level is (it is WARNING by default)."""

from __future__ import annotations

import logging
from collections.abc import Iterable


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
