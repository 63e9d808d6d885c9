"""`autotune list` and `autotune show`: what studies there are, and one study's trials and verdict."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.cli import trials, verdict
from autotune.cli.terminal import console, print_json
from autotune.errors import BadInput
from autotune.records import Summary
from autotune.run_dir import StudyFolder, find, studies
from autotune.wording import machine_text

INTERPRETER = re.compile(r"^(\S*/)?python[\d.]*\s+")  # says nothing in a list: the script does


def chosen(runs: Path, name: str | None) -> StudyFolder:
    """Returns the study a user means; the one that started last when no name is given.

    Raises:
        BadInput: there is none.
    """
    if name is not None:
        return find(runs, name)
    there = [(started, folder) for folder in studies(runs) if (started := _started_at(folder)) is not None]
    if not there:
        raise BadInput(f"STUDY: there is no study in {str(runs)!r}. Make one with `autotune run`, or give --runs-dir DIR.")
    return max(there, key=lambda pair: pair[0])[1]


def print_studies(runs: Path, *, as_json: bool) -> int:
    """Prints one line per study, the latest last."""
    there = sorted((row for folder in studies(runs) if (row := _row(folder)) is not None), key=lambda row: row["started_at"])
    if as_json:
        print_json(there)
        return 0
    out = console()
    if not there:
        out.print(f"No study in {runs}. Make one: [command]autotune run model=resnet18[/]")
        return 0
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    widths = {"study": _longest(there, "study", most=24), "started": 16, "trials": 6}
    widths["verdict"] = _longest(there, "verdict", most=40 if out.width >= 100 else 28)
    room = out.width - sum(widths.values()) - 2 * len(widths)
    widths["program"] = min(_longest(there, "program", most=60), max(10, room))  # gives way first
    for name in ("study", "started", "program", "trials", "verdict"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=widths[name])
    for row in there:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started_at"]))
        table.add_row(Text(row["study"], style="name"), when, Text(row["program"]), str(row["trials"]), Text(row["verdict"]))
    out.print(table)
    return 0


def print_study(folder: StudyFolder, *, as_json: bool) -> int:
    """Prints a study's trials and verdict; with `as_json` its summary as it is stored."""
    summary = read_summary(folder)
    if as_json:
        print_json(summary)
        return 0
    out = console()
    unit = str(summary.get("unit") or "samples")
    out.print(
        Text.assemble((str(summary["study"]), "name"), f"  {summary.get('title', '')}"), overflow="ellipsis", no_wrap=True
    )
    out.print(Text(machine_text(summary.get("machine") or {}), style="quiet"))
    out.print()
    out.print(trials.rows(summary.get("trials") or [], width=out.width, summary=summary))
    out.print()
    out.print(trials.legend(unit=unit))
    out.print()
    out.print(verdict.panel(summary, folder.path))
    return 0


def read_summary(folder: StudyFolder) -> Summary:
    """Returns a study's summary.

    Raises:
        BadInput: it has none yet, or it cannot be read.
    """
    try:
        return folder.read_summary()
    except FileNotFoundError:
        raise BadInput(f"STUDY: no trial has ended yet, got {folder.name!r}. Wait for its first trial.") from None
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{folder.summary_file}: not a summary, got: {error}. The trials are in {folder.path / 'trials'}."
        ) from error


def _started_at(folder: StudyFolder) -> float | None:
    try:
        return folder.read_study().started_at
    except (OSError, ValueError):  # of another version, or damaged: not the latest
        return None


def _longest(rows: list[dict[str, Any]], name: str, *, most: int) -> int:
    return min(most, max(len(name), *(len(row[name]) for row in rows)))


def _row(folder: StudyFolder) -> dict[str, Any] | None:
    try:
        study = folder.read_study()
    except (OSError, ValueError):
        return None
    try:
        summary = folder.read_summary()
    except (OSError, ValueError):
        summary = {"status": "running", "trials": []}

    return {
        "study": study.name,
        "started_at": study.started_at,
        "program": INTERPRETER.sub("", study.title),
        "trials": len(summary.get("trials") or []),
        "status": str(summary.get("status")),
        "verdict": verdict.headline(summary),
    }
