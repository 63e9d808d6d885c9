"""A listener that records every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.harness.protocol import Progress
from autotune.records import Kind, Knobs, StudyRecord, Summary, TrialRecord
from autotune.trials.events import Listener, Outlook


class RecordingListener(Listener):
    """Records every call.

    Attributes:
        calls: (method's name, its main argument), in order; without progress calls, which are only counted.
        num_progress: number of progress calls.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.num_progress = 0

    def named(self, name: str) -> list[Any]:
        """Returns the recorded arguments of one method's calls."""
        return [argument for called, argument in self.calls if called == name]

    def started(self, study: StudyRecord) -> None:
        """Records the study."""
        self.calls.append(("started", study))

    def planned(self, outlook: Outlook) -> None:
        """Records the outlook."""
        self.calls.append(("planned", outlook))

    def time_left(self, outlook: Outlook) -> None:
        """Records the outlook."""
        self.calls.append(("time_left", outlook))

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """Records (number, kind, knobs, why)."""
        self.calls.append(("trial_started", (number, kind, knobs, why)))

    def progress(self, progress: Progress, number: int | None = None) -> None:
        """Counts the call."""
        self.num_progress += 1

    def trial_ended(self, trial: TrialRecord) -> None:
        """Records the trial."""
        self.calls.append(("trial_ended", trial))

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """Records the finalists."""
        self.calls.append(("finals_started", list(trials)))

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        """Records (trial, knobs)."""
        self.calls.append(("attribution_started", (trial, list(knobs))))

    def notice(self, message: str) -> None:
        """Records the message."""
        self.calls.append(("notice", message))

    def waiting(self, message: str) -> None:
        """Records the message."""
        self.calls.append(("waiting", message))

    def finished(self, summary: Summary) -> None:
        """Records the summary."""
        self.calls.append(("finished", summary))
