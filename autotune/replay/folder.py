"""Provides a study's folder without a disk: a replay keeps nothing, and writing would take most of its time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from autotune.records import StudyRecord, Summary, TrialRecord, TrialRequest
from autotune.run_dir import StudyFolder

NOWHERE = Path("/nonexistent/autotune-replay")


class NoFolder(StudyFolder):
    """Accepts and discards documents, but counts trials."""

    is_kept = False

    def __init__(self) -> None:
        super().__init__(NOWHERE)
        self._num_trials = 0

    @property
    def journal_file(self) -> None:
        """Always None: Optuna's study is kept in memory."""
        return

    @contextlib.contextmanager
    def claimed(self) -> Iterator[str]:
        """Yields "": no other process can work on the study."""
        yield ""

    def write_study(self, record: StudyRecord) -> None:
        """Does nothing."""

    def write_config(self, yaml: str) -> None:
        """Does nothing."""

    def write_request(self, request: TrialRequest) -> None:
        """Counts the trial."""
        self._num_trials = max(self._num_trials, request.number + 1)

    def write_trial(self, record: TrialRecord) -> None:
        """Does nothing."""

    def write_summary(self, summary: Summary) -> None:
        """Does nothing."""

    def write_best(self, text: str) -> None:
        """Does nothing."""

    def next_number(self) -> int:
        """Returns the number of the next trial."""
        return self._num_trials

    def check(self) -> None:
        """Does nothing, since the folder cannot be lost."""
