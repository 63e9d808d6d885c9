"""Reads from a study's folder what is sent to MLflow, and makes the marks and digests by which MLflow's copy is checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.documents import read_json
from autotune.errors import BadInput
from autotune.plain_text import plain, shortened
from autotune.records import Kind, StudyRecord, Summary, TrialRecord
from autotune.run_dir import Known, StudyFolder
from autotune.trackers import entries, metrics

REPORT = "report.html"


class Cache:
    """Caches trial records, and texts made from them, until the records change."""

    def __init__(self) -> None:
        self.records: Known = {}
        self._made: dict[tuple[str, int], tuple[TrialRecord, Any, str]] = {}

    def made(self, what: str, trial: TrialRecord, make: Callable[[], str], *, of: Any = None) -> str:
        """Returns a text about a trial. It is made anew only if the trial's record or `of` has changed.

        Args:
            what: name of the text.
            trial: the trial.
            make: makes the text.
            of: everything else that the text depends on.
        """
        record, others, text = self._made.get((what, trial.number), (None, None, ""))
        if record is not trial or others != of:
            text = make()
            self._made[what, trial.number] = trial, of, text
        return text


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A study as it is now: its folder and the records in it."""

    folder: StudyFolder
    study: StudyRecord
    summary: Summary
    trials: list[TrialRecord]
    cache: Cache = field(default_factory=Cache)

    @classmethod
    def read(cls, folder: StudyFolder, cache: Cache | None = None) -> Contents:
        """Returns a folder's current contents; `cache` holds what earlier calls have read.

        Raises:
            BadInput: the folder is not a study.
        """
        cache = cache or Cache()
        try:
            trials = folder.read_trials(cache.records)
            return cls(folder=folder, study=folder.read_study(), summary=_summary(folder), trials=trials, cache=cache)
        except (OSError, ValueError) as error:
            problem = f"{folder.study_file}: not a study this version can read, got {first_line(error)}."
            raise BadInput(f"{problem} Give a study's name; see `autotune list`.") from error

    @property
    def status(self) -> str:
        """The status of the study's run in MLflow."""
        return entries.STUDY_STATUSES.get(self.summary.get("status", "running"), "FINISHED")

    @property
    def is_over(self) -> bool:
        """Whether the study has ended."""
        return self.status != "RUNNING"

    @cached_property  # used for every trial
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        return (self.study.detected.get("world_size") or 1) > 1 or any(trial.ranks for trial in self.trials)

    @property
    def ended_at(self) -> float:
        """When the last trial ended, in seconds since the epoch; when the study began if no trial has ended."""
        return max([self.study.started_at, *(trial.started_at + trial.seconds for trial in self.trials)])

    @property
    def written_at(self) -> float:
        """When the study last changed, in seconds since the epoch: a trial ended, or the summary was written."""
        try:
            return max(self.ended_at, self.folder.summary_file.stat().st_mtime)
        except OSError:  # no summary yet
            return self.ended_at

    def metrics(self, trial: TrialRecord) -> dict[str, float]:
        """Returns a trial's metrics."""
        return metrics.trial_metrics(trial, self._baseline)

    def tags(self, trial: TrialRecord) -> dict[str, str]:
        """Returns a trial's tags, without the parent's run id."""
        ratio, is_best = metrics.ratio(trial, self._baseline), self._is_best(trial)
        return entries.trial_tags(trial, self.study, self.mark(trial), ratio=ratio, is_best=is_best)

    def params(self, trial: TrialRecord) -> dict[str, str]:
        """Returns a trial's params."""
        return entries.params(trial.knobs, is_distributed=self.is_distributed)

    def mark(self, trial: TrialRecord) -> str:
        """Returns the trial's mark, "NUMBER:NONCE". An earlier attempt with the same number has another mark."""
        return self.cache.made("mark", trial, lambda: f"{trial.number}:{self._nonce(trial)}")

    def _nonce(self, trial: TrialRecord) -> str:
        try:
            return str(read_json(self.folder.trial_path(trial.number) / "spec.json")["nonce"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def digest(self, trial: TrialRecord) -> str:
        """Returns a short hash of everything that is sent to MLflow about a trial. If it is unchanged, nothing need be sent."""
        others = [entries.study_id(self.study), self._baseline.score if self._baseline else None, self.is_distributed]
        others += ["best"] if self._is_best(trial) else []
        return self.cache.made("digest", trial, lambda: digest([trial.as_json(), *others]), of=others)

    @cached_property
    def study_digest(self) -> str:
        """A short hash of everything that is sent to MLflow about the study itself."""
        return digest([self.summary, len(self.trials), [(name, file.stat().st_size) for file, name in self.files()]])

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yields the study's own files and where they go in MLflow; none before the study is over."""
        folder = self.folder
        own = [folder.study_file, folder.summary_file, folder.best_file, folder.config_file, folder.explanation_file]
        named = [(file, file.name) for file in (folder.path / REPORT, *own, *sorted(folder.path.glob("*.csv")))]
        tables = sorted(folder.path.glob("trials/[0-9]*/explain/*.csv"))
        named += [(file, f"explain/{file.parent.parent.name}/{file.name}") for file in tables]
        yield from (each for each in named if self.is_over and each[0].is_file() and self.has(each[0]))

    def has(self, file: Path) -> bool:
        """Whether a file really is in the study's folder: a link in a stranger's study may point to any of the user's files."""
        return file.resolve().is_relative_to(self.folder.path.resolve())

    def _is_best(self, trial: TrialRecord) -> bool:
        return trial.number == entries.best_number(self.summary)

    @property
    def _baseline(self) -> TrialRecord | None:
        return next((trial for trial in self.trials if trial.kind is Kind.baseline), None)


def digest(document: Any) -> str:
    """Returns a short hash of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]


def first_line(error: Exception) -> str:
    """Returns the first line of an error, shortened."""
    return shortened((plain(str(error)).strip() or type(error).__name__).splitlines()[0], 300)


def _summary(folder: StudyFolder) -> Summary:
    try:
        return folder.current_summary()  # not `read_summary`: a study that was killed must not stay "running" for ever
    except (OSError, ValueError):  # no summary yet
        return {}
