"""A listener that remembers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.harness.protocol import Progress
from autotune.records import Kind, Knobs, StudyRecord, Summary, TrialRecord
from autotune.trials.events import Listener, Outlook


class RecordingListener(Listener):
    """Keeps every call.

    Attributes:
        calls: (method's name, its argument of interest), in order; progress left out, it is counted.
        num_progress: progress calls.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.num_progress = 0

    def named(self, name: str) -> list[Any]:
        """Returns what was passed to the calls of one method."""
        return [argument for called, argument in self.calls if called == name]

    def started(self, study: StudyRecord) -> None:
        """Remembers the study."""
        self.calls.append(("started", study))

    def planned(self, outlook: Outlook) -> None:
        """Remembers the outlook."""
        self.calls.append(("planned", outlook))

    def time_left(self, outlook: Outlook) -> None:
        """Remembers the outlook."""
        self.calls.append(("time_left", outlook))

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """Remembers (number, kind, knobs, why)."""
        self.calls.append(("trial_started", (number, kind, knobs, why)))

    def progress(self, progress: Progress) -> None:
        """Counts."""
        self.num_progress += 1

    def trial_ended(self, trial: TrialRecord) -> None:
        """Remembers the record."""
        self.calls.append(("trial_ended", trial))

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """Remembers the finalists."""
        self.calls.append(("finals_started", list(trials)))

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        """Remembers (trial, knobs)."""
        self.calls.append(("attribution_started", (trial, list(knobs))))

    def notice(self, message: str) -> None:
        """Remembers the line."""
        self.calls.append(("notice", message))

    def finished(self, summary: Summary) -> None:
        """Remembers the summary."""
        self.calls.append(("finished", summary))
