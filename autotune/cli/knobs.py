"""Implements `autotune knobs`: prints the catalogue, one family of knobs, or the documentation of one knob."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console, print_json
from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.knobs.base import HostContext
    from autotune.knobs.describe import Row

NAMED = "default"  # the search space that is used unless another is given
WIDTH = 80  # columns that the list of knobs needs; on narrower terminals it wraps


def print_page() -> int:
    """Prints all knobs as one Markdown page, which is stored as docs/knobs.md."""
    from autotune.config.domains import keys_of_spaces
    from autotune.knobs.describe import page

    print(page(keys_of_spaces()), end="")
    return 0


def print_knobs(name: str | None, *, as_json: bool = False) -> int:
    """Prints one line per knob (all knobs, or one family), or the documentation of one knob.

    Raises:
        BadInput: there is no such knob; if the name is a configuration key, the message says so.
    """
    from autotune.config.domains import keys_of_spaces
    from autotune.knobs.describe import describe, overview
    from autotune.machine import host_context, host_facts

    here, spaces = host_context(host_facts(), None, is_recipe=False), keys_of_spaces()
    families = {key: rows for key, rows in overview(here).items() if name in (None, key, f"{key}.*")}
    if name is not None and not families:
        _refuse_key(name)
    if as_json:
        _print_json([row.key for rows in families.values() for row in rows] or [str(name)], here, spaces)
        return 0
    if families:
        _print_families(families, spaces[NAMED])
        return 0
    out, text = console(), describe(str(name), here, spaces=spaces)
    out.print(Markdown(text) if out.is_terminal else Text(text), soft_wrap=not out.is_terminal)
    return 0


def _print_json(keys: Sequence[str], here: HostContext, spaces: dict[str, list[str]]) -> None:
    from autotune.knobs.catalogue import knob

    print_json(
        [
            {
                "key": found.key,
                "tier": found.tier.value,
                "brief": found.brief,
                "summary": found.summary,
                "default": found.default,
                "not_available": found.blocked(here),
                "search_spaces": [space for space, keys in spaces.items() if found.key in keys],
            }
            for found in map(knob, keys)
        ]
    )


def _refuse_key(name: str) -> None:
    from autotune.config.describe import overview
    from autotune.config.keys import LEAVES
    from autotune.knobs.catalogue import is_knob

    if is_knob(name) or name not in LEAVES:
        return
    meaning = next((row.meaning for row in overview() if row.key.partition("=")[0] == name), "see its group").rstrip(".")
    raise BadInput(f"knob: no such knob, got {name!r}. It is a key of the configuration: {meaning}. See `autotune run --help`.")


def _print_families(families: dict[str, list[Row]], searched: list[str]) -> None:
    out = console()
    table = Table.grid(padding=(0, 1, 0, 0))
    for style in ("quiet", "key", "", ""):
        table.add_column(style=style, no_wrap=out.width >= WIDTH, overflow="fold")
    for number, (family, rows) in enumerate(families.items()):
        if number:
            table.add_row()
        table.add_row("", Text(family, style="name"))
        for row in rows:
            mark = "-" if row.blocked else "*" if row.key in searched else ""
            table.add_row(mark, Text(row.key, style="quiet" if row.blocked else ""), row.tier, Text(row.brief))
    out.print(table)
    out.print("\n* searched unless you name another search space   - not available on this machine")
    out.print("[command]autotune knobs NAME[/] explains one knob: its values, when it helps, when it hurts.")
