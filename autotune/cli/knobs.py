"""`autotune knobs`: the catalogue, or one knob explained."""

from __future__ import annotations

from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console


def print_knobs(name: str | None) -> int:
    """Prints every knob in a line, or one knob's documentation."""
    from autotune.knobs.describe import describe, overview
    from autotune.machine import circumstances, host_facts

    out = console()
    if name is not None:
        text = describe(name, circumstances(host_facts(), None, is_recipe=False))
        out.print(Markdown(text) if out.is_terminal else text)
        return 0
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("knob", no_wrap=True, style="key")
    table.add_column("tier", no_wrap=True)
    table.add_column("what it changes", ratio=1, overflow="fold")
    for row in overview():
        table.add_row(row.key, row.tier, Text(row.summary))
    out.print(table)
    out.print("\n[command]autotune knobs NAME[/] explains one: when it helps, when it hurts, what it costs.")
    return 0
