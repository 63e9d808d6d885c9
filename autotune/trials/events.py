"""Defines the events of a study and their listener."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.harness.protocol import Progress
from autotune.masking import Secrets
from autotune.records import Kind, Knobs, StudyRecord, Summary, TrialRecord


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is left of a study before one of its trials.

    Attributes:
        left_s: time left for everything; None for unlimited.
        explain_s: the part of `left_s` that is reserved for explaining the result; 0 once explaining begins.
        search_s: the part of `left_s` for search trials; None for unlimited, or once the search is over.
        num_trials: rough number of search trials that fit, at most as many as `study.budget.trials` still allows; None
            without a limit, or once the search is over.
        trial_s: typical duration of a search trial.
        num_searched: number of search trials so far.
    """

    left_s: float | None = None
    explain_s: float = 0.0
    search_s: float | None = None
    num_trials: int | None = None
    trial_s: float = 0.0
    num_searched: int = 0


class Tracking(Protocol):
    """The process that copies the study folder to the tracker, with an interface like `subprocess.Popen`."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process and returns its exit status; raises subprocess.TimeoutExpired."""

    def terminate(self) -> None:
        """Requests that the process end."""

    def hurry(self) -> None:
        """Lets the process continue at normal priority, because no trial runs any more."""


class Searching(Protocol):
    """Proposes and measures configurations between the baseline and the finals."""

    def run(self) -> str:
        """Searches and returns why it ended."""


class Listener:
    """Callbacks for the events of a study, all optional.

    They are called from the study's thread, in this order:

    - `started`, then `resumed` if earlier runs of the study have left trials.
    - For each trial, `time_left` (from the second trial on), `trial_started`, `progress` several times a second, and
      `trial_ended`. The calls for trials that run in parallel are interleaved.
    - Between trials, `planned` before the search, `finals_started` before the finals, `attribution_started` when an ablation
      begins.
    - `finished` at the end, also after an interrupt or if nothing worked, but not after a fault.

    `notice` and `waiting` may be called at any time, those about tracking even after `finished`.
    """

    def started(self, study: StudyRecord) -> None:
        """The study's folder exists, and no trial runs yet. Called again when the baseline has shown what can be searched."""

    def resumed(self, trials: Sequence[TrialRecord], spent_s: float) -> None:
        """The study is resumed.

        Args:
            trials: finished trials, by number.
            spent_s: wall time of earlier runs, including the time between trials.
        """

    def planned(self, outlook: Outlook) -> None:
        """The baseline has shown how long a trial takes. `outlook` says roughly how many trials the search will have."""

    def time_left(self, outlook: Outlook) -> None:
        """The study is about to run its next trial; `outlook` is what is left."""

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """A trial is launched.

        Args:
            number: the trial's number.
            kind: why it is run, such as Kind.search.
            knobs: the changes that the trial makes.
            why: one line on why it is tried.
        """

    def progress(self, progress: Progress, number: int | None = None) -> None:
        """A running trial has made progress.

        Args:
            progress: its newest progress.
            number: the trial's number; None for the trial that began last.
        """

    def trial_ended(self, trial: TrialRecord) -> None:
        """A trial is over and its record is on disk."""

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """The search is over.

        Args:
            trials: numbers of the trials that will be measured again, the baseline (0) first.
            reserved_s: time the finals may take; None for unlimited.
        """

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        """The ablation begins: the chosen configuration's changes are reverted one by one to measure their effects.

        Args:
            trial: number of the chosen trial.
            knobs: keys of the knobs that will be reverted, each alone.
            left_s: time the ablation may take; None for unlimited.
        """

    def notice(self, message: str) -> None:
        """There is a message for the user, for example that an interrupt was received."""

    def waiting(self, message: str) -> None:
        """The study waits for something outside of it. The message says for what, and for how long at most."""

    def finished(self, summary: Summary) -> None:
        """The verdict is on disk."""


class Masked(Listener):
    """Masks secrets in messages before it passes them to another listener.

    Args:
        listener: the other listener.
        secrets: what to mask.
    """

    def __init__(self, listener: Listener, secrets: Secrets) -> None:
        self._secrets = secrets
        for name in vars(Listener):
            if not name.startswith("_") and name != "notice":
                setattr(self, name, getattr(listener, name))
        self._notice = listener.notice

    def notice(self, message: str) -> None:
        """Passes on a message, masked."""
        self._notice(self._secrets.text(message))
