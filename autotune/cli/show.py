"""Implements `autotune list` and `autotune show`: prints all studies, or one study's trials and verdict."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from autotune.cli.terminal import MAX_WIDTH, Lines, console, print_json, table_width
from autotune.errors import BadInput
from autotune.plain_text import escaped, plain
from autotune.records import NewerVersion, StudyRecord, Summary
from autotune.run_dir import CUT_OFF, StudyFolder, is_study
from autotune.studies import call, find, studies
from autotune.wording import headline, machine_text

if TYPE_CHECKING:
    from rich.table import Table

INTERPRETER = re.compile(r"^(\S*/)?python[\d.]*\s+")  # removed in the list, where only the script matters
# Columns of the list -> how many characters of a cell must fit on one line; longer cells may wrap.
COLUMNS = {"study": 24, "started": 16, "program": 24, "trials": 6, "verdict": 40}
MAX_HINTS = 3  # maximum number of interrupted studies for which `list` prints the command to resume


def chosen(runs: Path, name: str | None) -> StudyFolder:
    """Returns the study that a name or path refers to, or the one that started last if none is given.

    If the name is ambiguous, prints on standard error which study is used.

    Raises:
        BadInput: there is no such study.
    """
    if name is not None:
        folder = _readable(find(runs, name))
        if other := _other(runs, name, folder):
            words = f"autotune: {name} means {folder.path}, the latest of that name; {other} is another study"
            print(escaped(words), file=sys.stderr)
        return folder
    there = list(studies(runs))
    if not there:
        raise BadInput(f"STUDY: there is no study in {str(runs)!r}. Make one with `autotune run`, or give --runs-dir DIR.")
    return _readable(max(there, key=lambda folder: _place(_study(folder))))


def _readable(folder: StudyFolder) -> StudyFolder:
    """Returns a study after checking that no newer version of autotune made it. Other problems are reported later.

    Raises:
        BadInput: a newer version of autotune made it.
    """
    if isinstance(error := _study(folder), NewerVersion):
        raise BadInput(f"STUDY: made by a newer version of autotune, got {folder.name!r} ({error}). Update autotune.")
    return folder


def _other(runs: Path, name: str, folder: StudyFolder) -> str:
    """Returns another study with exactly this name, in the runs folder or the working directory; "" if there is none."""
    places = () if os.sep in name else (os.path.join(runs, name), os.path.join(os.curdir, name))
    there = (place for place in places if is_study(Path(place)))
    return next((place for place in there if not os.path.samefile(place, folder.path)), "")


def print_studies(runs: Path, *, as_json: bool) -> int:
    """Prints one line per study, latest last."""
    found = sorted(((folder, _study(folder)) for folder in studies(runs)), key=lambda pair: _place(pair[1]))
    there = [_row(folder, study) for folder, study in found]
    if as_json:
        print_json(there)
        return 0
    out = console()
    if not there:
        out.print(Text.assemble(f"No study in {runs}. Make one: ", ("autotune run model=resnet18", "command")))
        return 0
    out.print(_table(there, table_width(out)))
    latest = {study.base: folder.name for folder, study in found if isinstance(study, StudyRecord)}
    for row in [row for row in there if row["status"] == "interrupted"][-MAX_HINTS:]:
        command = Text(f"autotune resume {call(StudyFolder(runs / row['study']), latest)}", style="command")
        out.print(Text.assemble((f"to continue {escaped(row['study'])}  ", "quiet"), command))
    return 0


def _table(rows: list[dict[str, Any]], width: int | None) -> Lines | Table:
    """Returns a table of studies. If each row fits on one line, does not use rich, because rich is far slower."""
    names = list(COLUMNS) if width is None else _fitting(rows, width)
    cells = [[_cell(row, name) for name in names] for row in rows]
    lines = Lines(names, cells)
    if (width is None or lines.width <= width) and not any("\n" in cell for row in cells for cell in row):
        return lines
    from rich.table import Table  # imported here, since `list` seldom needs it

    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=width is None or name in ("started", "trials"), overflow="fold")
    for first, *others in cells:
        table.add_row(Text(first, style="name"), *map(Text, others))
    return table


def _cell(row: dict[str, Any], name: str) -> str:
    if name == "study":
        return escaped(row["study"])  # a name with a line break would look like two studies
    if name == "started":
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started_at"])) if row["started_at"] else ""
    return plain(str(row[name]))


def _fitting(rows: list[dict[str, Any]], width: int) -> list[str]:
    """Returns the names of the columns that the table has on a terminal with this width.

    If the table is too wide, leaves out `started` and, if that is not enough, `trials`. If it is still too wide, the longest
    cells wrap.
    """
    needed = {
        name: min(most, max(len(name), *(len(str(row[name])) for row in rows))) if name != "started" else most
        for name, most in COLUMNS.items()
    }
    for left_out in ("started", "trials"):
        if sum(needed.values()) + 2 * (len(needed) - 1) > width:
            del needed[left_out]
    return list(needed)


def print_study(folder: StudyFolder, *, as_json: bool) -> int:
    """Prints a study's trials and verdict, or with `as_json` its summary."""
    from autotune.cli import trials, verdict  # imported here, since `list` and other commands do not need them

    summary = read_summary(folder)
    if as_json:
        print_json(summary)
        return 0
    out = console()
    width = table_width(out)
    out.print(Text.assemble((escaped(summary["study"]), "name"), f"  {summary.get('title', '')}"), overflow="fold")
    out.print(Text(machine_text(summary.get("machine") or {}), style="quiet"))
    out.print()
    if ended := summary.get("trials") or []:
        out.print(trials.rows(ended, width=width, summary=summary))
        out.print()
        for line in (trials.legend(width, summary), trials.left_out(width), trials.starts(ended)):
            if line:
                out.print(line)
    else:
        out.print(Text("no trial has ended"))
    if cycles := summary.get("cycles"):
        out.print(Text(str(cycles), style="quiet"))
    out.print()
    if several := trials.ranks(summary):
        out.print(several)
        out.print()
    if width:
        out.print(verdict.panel(summary, folder.path), width=min(out.width, MAX_WIDTH))
    else:
        out.print(Text("\n".join(verdict.lines(summary, folder.path))))
    return 0


def read_summary(folder: StudyFolder) -> Summary:
    """Returns a study's summary.

    Raises:
        BadInput: there is no summary yet, or it cannot be read.
    """
    try:
        return folder.current_summary()
    except FileNotFoundError:
        try:
            folder.read_study()
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{folder.study_file}: not a study, got: {error}. Remove the folder, or restore the file."
            ) from error
        if folder.is_owned:
            raise BadInput(f"STUDY: {folder.name!r} has nothing to show yet. Wait for its first trial.") from None
        if folder.trial_files("trial.json"):
            raise BadInput(f"{folder.summary_file}: missing. {_rebuilt(folder)}") from None
        go_on = f"To continue: autotune resume {call(folder)}"
        raise BadInput(f"STUDY: {folder.name!r} has nothing to show: it was ended before its first trial. {go_on}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder.summary_file}: not a summary, got: {error}. {_rebuilt(folder)}") from error


def read_study(folder: StudyFolder) -> StudyRecord:
    """Returns a study's record.

    Raises:
        BadInput: it cannot be read.
    """
    try:
        return folder.read_study()
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder.study_file}: cannot be read, got: {error}. Start a new study with `autotune run`.") from error


def check_cwd(study: StudyRecord) -> None:
    """Checks that the folder in which a study's program ran still exists.

    Raises:
        BadInput: it does not.
    """
    if not os.path.isdir(study.cwd):
        raise BadInput(
            f"cwd: the folder that the program ran in does not exist any more, got {study.cwd!r}. Restore it, or start a new "
            "study."
        )


def _rebuilt(folder: StudyFolder) -> str:
    """Returns how to get a study's summary back."""
    trials = folder.path / "trials"
    return f"The trials are in {trials}; `autotune resume {call(folder)}` rebuilds the summary from them."


def _place(study: StudyRecord | Exception) -> tuple[int, float]:
    """Returns a key that sorts studies by start. The sequence number comes first, since clocks may be set back.

    Damaged studies sort before all others.
    """
    return (study.sequence, study.started_at) if isinstance(study, StudyRecord) else (-1, 0.0)


def _study(folder: StudyFolder) -> StudyRecord | Exception:
    """Returns a study's record, or why it cannot be read."""
    try:
        return folder.read_study()
    except (OSError, ValueError) as error:
        return error


def _row(folder: StudyFolder, study: StudyRecord | Exception) -> dict[str, Any]:
    if isinstance(study, Exception):
        why = "missing" if isinstance(study, FileNotFoundError) else study
        return _unreadable(folder, StudyRecord(name=folder.name, title="", command=[], cwd=""), f"study.json: {why}")
    try:
        summary = folder.current_summary(is_outline=True)
    except FileNotFoundError:  # the first trial has not ended yet
        is_owned = folder.is_owned
        summary = {"status": "running" if is_owned else "interrupted", "reason": "" if is_owned else CUT_OFF, "num_trials": 0}
    except (OSError, ValueError) as error:
        return _unreadable(folder, study, f"summary.json: {error}")
    return {
        "study": folder.name,
        "started_at": study.started_at,
        "program": INTERPRETER.sub("", study.title),
        "trials": summary["num_trials"],
        "status": str(summary["status"]),
        "verdict": headline(summary),
    }


def _unreadable(folder: StudyFolder, study: StudyRecord, problem: str) -> dict[str, Any]:
    return {
        "study": folder.name,
        "started_at": study.started_at,
        "program": study.title,
        "trials": len(folder.trial_files("trial.json")),
        "status": "unreadable",
        "verdict": f"unreadable: {problem}",
    }
