"""The table of trials: the same columns in the live view, where rows come one by one, and in `show`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import outcome_style
from autotune.records import Kind
from autotune.wording import bytes_text, changes_phrase, compact_text, number_text, ratio_text

WIDE = 96  # from this many columns on there is room for the ratio
QUIET_OUTCOMES = ("ok", "raced")  # a number says enough
INDENT = 7  # where the outcome's column begins


def table(width: int, *, header: bool = True, unit: str = "samples") -> Table:
    """Returns an empty table of trials for a terminal of `width` columns; what a trial changes gets the room that is left."""
    made = Table(box=None, show_header=header, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False, width=width)
    made.add_column("trial", width=5, no_wrap=True)
    made.add_column("outcome", width=11, no_wrap=True)
    made.add_column(f"{unit}/s", width=9, justify="right", no_wrap=True)
    if width >= WIDE:
        made.add_column("ratio", width=6, justify="right", no_wrap=True)
    made.add_column("D", width=6, justify="right", no_wrap=True, style="quiet")
    made.add_column("L", width=6, justify="right", no_wrap=True, style="quiet")
    made.add_column("memory", width=8, justify="right", no_wrap=True, style="quiet")
    made.add_column("what changed", ratio=1, no_wrap=True, overflow="ellipsis")
    return made


def add(into: Table, trial: dict[str, Any], *, width: int, baseline: float | None, best: int | None = None) -> None:
    """Adds a trial, given as the record's or the summary's plain values.

    Args:
        into: made by `table` for the same width.
        trial: one of `Summary["trials"]`.
        width: columns of the terminal.
        baseline: the baseline's rate, for the ratio.
        best: number of the trial to set off.
    """
    value, is_best = trial.get("value"), trial["number"] == best
    ratio = value / baseline if value and baseline else None
    cells: list[Text | str] = [
        Text(f"{trial['number']:04d}", style="name" if is_best else "quiet"),
        Text(str(trial["outcome"]), style=outcome_style(str(trial["outcome"]))),
        Text(number_text(value), style="name" if is_best else "number"),
        *([Text(ratio_text(ratio), style="name" if is_best else "number")] if width >= WIDE else []),
        compact_text(trial.get("device_rate")),
        compact_text(trial.get("loader_rate")),
        bytes_text(trial.get("peak_memory_bytes")),
        _what(trial, is_best=is_best),
    ]
    into.add_row(*cells)


def legend(*, unit: str) -> Text:
    """Returns the line that explains the columns' letters."""
    return Text(f"D: the device with a free loader, L: what the loader sustains ({unit}/s)", style="quiet")


def rows(trials: Sequence[dict[str, Any]], *, width: int, summary: dict[str, Any]) -> Group:
    """Returns the whole table of a study, header and one `row` a trial."""
    best, baseline = (summary.get("best") or {}).get("trial"), (summary.get("baseline") or {}).get("value")
    header = table(width, unit=str(summary.get("unit") or "samples"))
    return Group(header, *(row(trial, width=width, baseline=baseline, best=best) for trial in trials))


def row(trial: dict[str, Any], *, width: int, baseline: float | None, best: int | None = None) -> RenderableType:
    """Returns one trial as a row that lines up with `table`; what went wrong stands below it, indented."""
    made = table(width, header=False)
    add(made, trial, width=width, baseline=baseline, best=best)
    reason = str(trial.get("reason") or "")
    if not reason or str(trial["outcome"]) in QUIET_OUTCOMES:
        return made
    below = Text(f"{' ' * INDENT}{reason}", style="quiet", no_wrap=True, overflow="ellipsis")
    return Group(made, below)


def _what(trial: dict[str, Any], *, is_best: bool) -> Text:
    kind, again = str(trial.get("kind")), trial.get("repeats")
    words = changes_phrase(trial.get("changed") or {})
    if kind == Kind.baseline:
        words = "baseline"
    elif kind == Kind.final:
        words = "final" if again is None else f"final of {again:04d}" if again else "final of the baseline"
    elif kind == Kind.parity:
        words = f"losses of {words}" if trial.get("changed") else "losses of the baseline"
    return Text(words, style="name" if is_best else "default")
