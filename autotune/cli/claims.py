"""Renders a verification for a terminal: claimed and measured values."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.records import Summary
from autotune.report.claims import Row, compared_rows, long_rows, long_title
from autotune.wording import changes_phrase


def blocks(summary: Summary) -> Group:
    """Returns claimed and measured values side by side, then the long runs, then what differs from the claim's conditions."""
    found, unit = summary["verification"], str(summary.get("unit") or "samples")
    made: list[RenderableType] = [
        Text.assemble((f"{found['file']}  ", "quiet"), changes_phrase(found.get("changed") or {}), overflow="fold"),
        Text(),
    ]
    made.append(_table((f"{unit}/s", "claimed", "here and now", "now / claimed"), compared_rows(found)))
    if found.get("long"):
        title = (f"{unit}/s", "claimed", "long run", "claimed / long")
        made.append(Padding(Group(Text(long_title(found)), _table(title, long_rows(found))), (1, 0, 0, 0)))
    if found.get("differences"):
        lines = [Text(f"  {phrase}", style="quiet", overflow="fold") for phrase in found["differences"]]
        made.append(Padding(Group(Text("what differs from the conditions of the claim"), *lines), (1, 0, 0, 0)))
    return Group(*made)


def _table(titles: Row, rows: list[Row]) -> RenderableType:
    made = Table(box=None, header_style="quiet", padding=(0, 3, 0, 0), pad_edge=False)
    made.add_column(titles[0], no_wrap=True)
    for title in titles[1:]:
        made.add_column(title)
    for name, *cells in rows:
        made.add_row(Text(name, style="name" if name == "speed-up" else ""), *map(Text, cells))
    return made
