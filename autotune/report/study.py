"""Reads what a report shows from a study's folder: the summary, the trials' records and the tables of explained trials."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autotune.explain.explanation import folders_of, passes_of
from autotune.explain.tables import Tables, explained, read_tables
from autotune.explained import entry_of
from autotune.harness.explain.documents import TRACE
from autotune.records import Kind, KnobValue, Outcome, Summary, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.shapes import finite
from autotune.space import Choice, domain_from_json
from autotune.studies import call
from autotune.wording import listed

BASELINE = 0  # number of the baseline's trial
MAX_UNREAD = 3  # maximum number of unreadable trials that are listed


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that a report shows about a study.

    Attributes:
        folder: its folder.
        summary: its summary, without secrets and without numbers that are not finite.
        records: the trials' records, by number, without those that cannot be read.
        tables: number of an explained trial -> its tables.
        space: searched knob -> its values, () for an interval. If study.json cannot be read: changed knob -> ().
        unread: a sentence for each missing or damaged file, on what the report lacks without it.
        name: what to type for the study on a command line: one word, followed by the option for its runs folder if needed.
        label: its name in a comparison with other studies.
    """

    folder: StudyFolder
    summary: Summary
    records: dict[int, TrialRecord] = field(default_factory=dict)
    tables: dict[int, Tables] = field(default_factory=dict)
    space: dict[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    name: str = ""
    label: str = ""

    @property
    def unit(self) -> str:
        """What the rates count: "samples", "tokens" or "steps"."""
        return str(self.summary.get("unit") or "samples")

    @property
    def best(self) -> int:
        """Number of the best trial; the baseline's if nothing is better."""
        return int((self.summary.get("best") or {}).get("trial") or BASELINE)

    @property
    def sides(self) -> dict[str, int]:
        """Role -> trial number of the baseline and, if it is another trial, of the best."""
        return {"baseline": BASELINE, "best": self.best} if self.best != BASELINE else {"baseline": BASELINE}

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The summary's trials."""
        return list(self.summary.get("trials") or [])

    @cached_property
    def finals(self) -> list[dict[str, Any]]:
        """The trials of the finals."""
        return [trial for trial in self.trials if trial.get("kind") == Kind.final]

    @property
    def configurations(self) -> list[dict[str, Any]]:
        """The first trial of each configuration: the baseline, search trials, the best, and trials repeated in the finals."""
        again = {self.best, *(trial.get("repeats") for trial in self.finals)}
        kinds = (Kind.baseline, Kind.search)
        return [trial for trial in self.trials if trial.get("kind") in kinds or trial["number"] in again]

    def trial(self, number: int) -> dict[str, Any]:
        """Returns a trial's entry in the summary; {} if there is none."""
        return next((trial for trial in self.trials if trial.get("number") == number), {})

    def explained(self, number: int) -> dict[str, Any]:
        """Returns the explanation of a trial; {} if it was not explained."""
        return entry_of(self.summary.get("explanation"), number) or {}

    def rows(self, table: str, number: int) -> list[dict[str, Any]]:
        """Returns the rows of a table of a trial's rank 0; [] if there is none."""
        return self.tables[number].rows(table, 0) if number in self.tables else []

    def why_absent(self, table: str, what: str = "") -> str:
        """Returns a sentence on why a table of the best trial is missing, with the command that makes it.

        Args:
            table: name of the table.
            what: what the table would show, as the subject of the sentence; "" if a title names it.
        """
        tables = self.tables.get(self.best)
        if tables is not None and (reason := tables.absent.get(table)):
            more = f" `autotune explain {self.name}` runs it." if "was not run" in reason else ""
            return f"{what or 'Not known'}: {reason}.{more}"
        option = f" --trial {self.best}" if self.best == BASELINE else ""
        return f"{f'{what}: not' if what else 'Not'} known yet. `autotune explain {self.name}{option}` finds it out."


def read(folder: StudyFolder, summary: Summary) -> Study:
    """Reads a study. What cannot be read is left out and named in `unread`.

    Args:
        folder: its folder, whose method `mask` removes secrets from texts.
        summary: its summary, which may be newer than the one on disk.
    """
    plain = finite(json.loads(folder.mask(json.dumps(summary))))
    made = Study(folder=folder, summary=plain, name=call(folder), label=folder.name)
    _read_records(made)
    try:
        made.space.update(_space(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        made.space.update({key: () for trial in made.trials for key in trial.get("changed") or {}})
        what = "Settings and values that were never tried are not known."
        made.unread.append(folder.mask(f"{folder.study_file}: {_why(error)}. {what}"))
    for number in made.sides.values():
        if (found := _tables(made, number)) is not None:
            made.tables[number] = found
    return made


def _read_records(study: Study) -> None:
    """Reads the records of the summary's trials."""
    problems = []
    for number in [trial["number"] for trial in study.trials]:
        try:
            study.records[number] = study.folder.read_trial(number)
        except (OSError, ValueError) as error:
            problems.append(f"{study.folder.trial_path(number) / 'trial.json'}: {_why(error)}")
    if problems:
        lost = "It is not known when these trials ran, how long their steps took and what disturbed them."
        study.unread.append(study.folder.mask(f"{listed(problems, MAX_UNREAD, '; ')}. {lost}"))


def _why(error: Exception) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"


def _space(folder: StudyFolder) -> dict[str, tuple[KnobValue, ...]]:
    """Returns knob -> values of a study's search space; () for an interval."""
    found = {key: domain_from_json(raw) for key, raw in folder.read_study().space.items()}
    return {key: domain.values if isinstance(domain, Choice) else () for key, domain in found.items() if domain}


def _tables(study: Study, number: int) -> Tables | None:
    """Returns the tables of a trial; None if no pass succeeded. Tables of a trace are read from disk, not made again."""
    passes = passes_of(number, list(study.records.values()))
    ran = {name: one for name, one in passes.items() if one.outcome is Outcome.ok}
    folders = folders_of(ran, study.folder.path / "trials")
    if TRACE in folders:
        with contextlib.suppress(OSError, ValueError):
            return read_tables(folders[TRACE])
        del folders[TRACE]
    return explained(list(folders.values()), mask=study.folder.mask).tables if folders else None
