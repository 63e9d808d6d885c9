"""Prints the configuration keys at the end of the help of `autotune run`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console

MOST_KEY = 34  # columns; longer keys wrap


def print_keys() -> None:
    """Prints every key with its default and its meaning."""
    from autotune.config.describe import overview

    out, rows = console(), overview()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1), pad_edge=False)
    table.add_column(overflow="fold", width=min(MOST_KEY, max(len(row.key) for row in rows)), style="key")
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(Text(row.key), Text(row.meaning))
    out.print(Text(" Configuration: KEY=VALUE, with the default", style="name"))
    out.print(table)
    out.print(" null: not set. [command]autotune knobs[/] explains the knobs.")
