"""`autotune knobs`: the catalogue, one family of it, or one knob explained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console
from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.knobs.describe import Row

NAMED = "default"  # the search space of a study that names none


def print_page() -> int:
    """Prints docs/knobs.md."""
    from autotune.config.spaces import keys_of_spaces
    from autotune.knobs.describe import page

    print(page(keys_of_spaces()), end="")
    return 0


def print_knobs(name: str | None) -> int:
    """Prints every knob in a line, one family of them, or one knob's documentation.

    Raises:
        BadInput: there is no such knob; a key of the configuration is told from one.
    """
    from autotune.config.spaces import keys_of_spaces
    from autotune.knobs.catalogue import GROUPS
    from autotune.knobs.describe import describe
    from autotune.machine import host_context, host_facts

    here, spaces = host_context(host_facts(), None, is_recipe=False), keys_of_spaces()
    family = (name or "").removesuffix(".*")
    if name is None or family in (*GROUPS, "env"):
        from autotune.knobs.describe import overview

        _print_families({key: rows for key, rows in overview(here).items() if key == family or not family}, spaces[NAMED])
        return 0
    _refuse_key(name)
    out, text = console(), describe(name, here, spaces=spaces)
    out.print(Markdown(text) if out.is_terminal else text, soft_wrap=not out.is_terminal)
    return 0


def _refuse_key(name: str) -> None:
    from autotune.config.describe import overview
    from autotune.config.keys import LEAVES
    from autotune.knobs.catalogue import is_knob

    if is_knob(name) or name not in LEAVES:
        return
    meaning = next((row.meaning for row in overview() if row.key.partition("=")[0] == name), "see its group there").rstrip(".")
    raise BadInput(f"knob: a key of the configuration, not a knob, got {name!r}: {meaning}. See `autotune run --help`.")


def _print_families(families: dict[str, list[Row]], searched: list[str]) -> None:
    out = console()
    table = Table.grid(padding=(0, 1, 0, 0))
    for style in ("quiet", "key", "", ""):
        table.add_column(style=style, no_wrap=True)
    for number, (family, rows) in enumerate(families.items()):
        if number:
            table.add_row()
        table.add_row("", Text(family, style="name"))
        for row in rows:
            mark = "-" if row.blocked else "*" if row.key in searched else ""
            table.add_row(mark, Text(row.key, style="quiet" if row.blocked else ""), row.tier, Text(row.brief))
    out.print(table)
    out.print("\n* searched unless you name another search space   - not on this machine")
    out.print("[command]autotune knobs NAME[/] explains one: its values, when it helps, when it hurts.")
