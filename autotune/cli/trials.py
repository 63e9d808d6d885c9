"""Renders the table of trials, with the same columns in `show` and in the live view. Also lists the best trial's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import outcome_style
from autotune.explain.table import quotient
from autotune.quantities import bytes_text, clock_text, compact_text, number_text, percent_text, ratio_text
from autotune.records import THROUGHPUT, TIME, Summary, objective_names
from autotune.report.trials import is_better, memory_text, trial_phrase
from autotune.wording import communication_text, head_text, rank_names, score_of

WIDE = 96  # columns; narrower terminals show neither ratio nor memory
NARROW = 72  # columns; narrower terminals do not show D and L either, to keep room for what changed
QUIET_OUTCOMES = ("ok", "raced")  # outcomes whose rows show no reason
INDENT = 7  # where the outcome column begins


def table(width: int | None, *, about: Summary, header: bool = True) -> Table:
    """Returns an empty table of trials for a terminal of `width` columns. The last column takes the remaining width.

    Args:
        width: columns of the terminal; None for a pipe, where nothing wraps.
        about: the summary, or the part of it that is known: objective, slots and unit.
        header: whether to show the column heads.
    """
    unit = str(about.get("unit") or "samples")
    made = Table(box=None, show_header=header, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False, width=width)
    is_wide, is_narrow = width is None or width >= WIDE, _is_narrow(width)
    made.add_column("trial", width=5, no_wrap=True)
    if _has_slots(about):
        made.add_column("slot", width=4, no_wrap=True, style="quiet")
    made.add_column("outcome", width=11, no_wrap=True)
    made.add_column(Text(f"{unit}/s"), width=9, justify="right", no_wrap=True)
    for name in _others(about):
        made.add_column(Text(head_text(name, unit)), width=9, justify="right", no_wrap=True)
    if is_wide:
        made.add_column("ratio", width=6, justify="right", no_wrap=True)
    if not is_narrow:
        made.add_column("D", width=6, justify="right", no_wrap=True, style="quiet")
        made.add_column("L", width=6, justify="right", no_wrap=True, style="quiet")
    if is_wide:
        made.add_column("memory", width=8, justify="right", no_wrap=True, style="quiet")
    made.add_column("what changed", ratio=None if width is None else 1, no_wrap=width is None, overflow="fold")
    return made


def legend(width: int | None, about: Summary) -> Text | None:
    """Returns the line that explains the column heads; None if no column shown needs an explanation."""
    unit, samples = str(about.get("unit") or "samples"), (about.get("terms") or {}).get("samples")
    words = [f"D: rate of the training step alone, L: rate of the loader alone ({unit}/s)"] if not _is_narrow(width) else []
    baseline = about.get("baseline") or {}
    if (width is None or width >= WIDE) and baseline.get("measured_in") == "finals":  # the ratio of trial 0 is not 1.00x
        words.append("ratio: to the baseline's mean in the finals")
    if TIME in _others(about) and samples:
        words.append(f"{head_text(TIME, unit)}: from launch to the end of {samples:,.0f} samples (h:min:s)")
    return Text(", ".join(words), style="quiet") if words else None


def _is_narrow(width: int | None) -> bool:
    return width is not None and width < NARROW


def left_out(width: int | None) -> Text | None:
    """Returns a line that names the columns for which the terminal is too narrow; None if all fit."""
    if width is None or width >= WIDE:
        return None
    names = "ratio, memory" if width >= NARROW else "ratio, D, L, memory"
    return Text(f"width {width}: without {names}; a terminal of {WIDE} columns or --json shows them", style="quiet")


def starts(trials: Sequence[dict[str, Any]]) -> Text | None:
    """Returns a line on how many trials were started warm; None if no trial was."""
    spared_s = [float(trial.get("spared_s") or 0.0) for trial in trials if trial.get("start") == "warm"]
    if not spared_s:
        return None
    num, all_s = len(spared_s), sum(spared_s)
    words = f"started warm, with torch already imported: {num} of the search's trials, {all_s:.0f} s saved (launch.warm)"
    return Text(words, style="quiet")


def rows(trials: Sequence[dict[str, Any]], *, width: int | None, summary: dict[str, Any]) -> Group:
    """Returns the whole table of a study: the header and one `row` per trial."""
    best, baseline = (summary.get("best") or {}).get("trial"), score_of(summary, summary.get("baseline") or {})
    shown, before = [], None
    for trial in trials:
        shown.append(row(trial, width=width, about=summary, baseline=baseline, best=best, before=before))
        if is_better(summary, trial, before):
            before = trial
    return Group(table(width, about=summary), *shown)


def row(
    trial: dict[str, Any],
    *,
    width: int | None,
    about: Summary,
    baseline: float | None,
    best: int | None = None,
    before: dict[str, Any] | None = None,
) -> RenderableType:
    """Returns one trial as a row aligned with `table`; the reason for a failure follows below, indented.

    Args:
        trial: the values of a record, or an entry of a summary.
        width: columns of the terminal.
        about: as for `table`.
        baseline: the baseline's score, for the ratio.
        best: number of the trial to highlight.
        before: the best of the earlier trials; the changes are described relative to it.
    """
    made = table(width, about=about, header=False)
    is_wide, is_narrow = width is None or width >= WIDE, _is_narrow(width)
    value, score, is_best = trial.get("value"), score_of(about, trial), trial["number"] == best
    ratio = score / baseline if score and baseline else None
    values = trial.get("objectives") or {}
    cells: list[Text | str] = [
        Text(f"{trial['number']:04d}", style="name" if is_best else "quiet"),
        *([Text(str(trial.get("slot") or "").partition(":")[0])] if _has_slots(about) else []),
        Text(str(trial["outcome"]), style=outcome_style(str(trial["outcome"]))),
        Text(number_text(value), style="name" if is_best else "number"),
        *(Text(_cell_text(name, values.get(name))) for name in _others(about)),
        *([Text(ratio_text(ratio), style="name" if is_best else "number")] if is_wide else []),
        *([] if is_narrow else [compact_text(trial.get("device_rate")), compact_text(trial.get("loader_rate"))]),
        *([memory_text(trial)] if is_wide else []),
        Text(trial_phrase(trial, before), style="name" if is_best else "default"),
    ]
    made.add_row(*cells)
    reason = str(trial.get("reason") or "")
    if not reason or str(trial["outcome"]) in QUIET_OUTCOMES:
        return made
    words = Text(reason, style="quiet", overflow="fold")  # not shortened: the end often says where the error is
    return Group(made, Padding(words, (0, 0, 0, INDENT)))


def ranks(summary: Summary) -> Group | None:
    """Returns a table of the best trial's ranks, or of the baseline's if there is no best; None for single-process training."""
    number = (summary.get("best") or summary.get("baseline") or {}).get("trial")
    trial: dict[str, Any] = next((each for each in summary.get("trials") or [] if each["number"] == number), {})
    found: dict[str, Any] = trial.get("ranks") or {}
    if not found:
        return None
    made = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    made.add_column(f"rank (trial {number})", no_wrap=True)
    unit = str(summary.get("unit") or "samples")
    for name in (f"{unit}/s", "input", "ranks", "memory"):
        made.add_column(Text(name), justify="right", no_wrap=True)
    for entry, name in zip(found["by_rank"], rank_names(found["by_rank"]), strict=True):
        slow = "  the other ranks wait for it" if entry["rank"] in found["stragglers"] else ""
        made.add_row(
            Text.assemble(name, (slow, "warn")),
            compact_text(entry["rate_per_s"]),
            percent_text(entry["data_wait_frac"]),
            percent_text(quotient(entry["exposed_s"], entry["step_s"])),
            bytes_text(entry["peak_memory_bytes"]),
        )
    legend = "input, ranks: share of a step spent waiting for input and for other ranks"
    return Group(made, Text(legend, style="quiet"), Text(communication_text(found), style="quiet"))


def _has_slots(about: Summary) -> bool:
    """Whether search trials run in parallel."""
    return int((about.get("slots") or {}).get("num") or 1) > 1


def _others(about: Summary) -> list[str]:
    """Returns the objectives besides throughput, which always has a column."""
    return [name for name in objective_names(about.get("objective") or THROUGHPUT) if name != THROUGHPUT]


def _cell_text(name: str, value: float | None) -> str:
    if name == TIME and value is not None:
        return clock_text(value)
    return number_text(value)  # the unit is in the column head
