"""What happens in a study, and whom it is told."""

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
        search_s: of that, time for search trials; None for unlimited, or once the search is over.
        num_trials: search trials that about fit, those that `study.budget.trials` leaves at most; None where nothing bounds
            them, or once the search is over.
        trial_s: what a search trial takes, typically.
        num_searched: search trials so far.
    """

    left_s: float | None = None
    search_s: float | None = None
    num_trials: int | None = None
    trial_s: float = 0.0
    num_searched: int = 0


class Tracking(Protocol):
    """The process that copies the study folder to the tracker, as `subprocess.Popen` shows it."""

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code; raises subprocess.TimeoutExpired."""

    def terminate(self) -> None:
        """Asks it to end."""


class Searching(Protocol):
    """What proposes and measures configurations from the baseline to the finals."""

    def run(self) -> str:
        """Searches and returns why it ended."""


class Listener:
    """Whom the study tells what happens; every method may be left out. Called from the study's thread, in this order.

    `started`, `resumed` when earlier runs of the study have left trials, then for each trial `time_left` (from the second on),
    `trial_started`, `progress` (several times a second) and `trial_ended`; `planned` once before the search, `finals_started`
    before the finals' trials, `attribution_started` among them when the ablation begins; `finished` at the
    end, also after an interrupt and when nothing worked, but not after a fault; `notice` at any time, of tracking also after
    that.
    """

    def started(self, study: StudyRecord) -> None:
        """The study folder is there, no trial has run. Called again when the baseline has shown what can be searched."""

    def resumed(self, trials: Sequence[TrialRecord], spent_s: float) -> None:
        """The study is gone on with.

        Args:
            trials: those that are over, by number.
            spent_s: wall time that they and what lay between them took.
        """

    def planned(self, outlook: Outlook) -> None:
        """The baseline has told what a trial costs: about how many the search will have, and in what time."""

    def time_left(self, outlook: Outlook) -> None:
        """What is left of the study before its next trial."""

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """A trial is launched.

        Args:
            number: its number.
            kind: baseline, search, attribution or final.
            knobs: what it changes.
            why: one line on why it is tried.
        """

    def progress(self, progress: Progress) -> None:
        """Where the running trial stands."""

    def trial_ended(self, trial: TrialRecord) -> None:
        """A trial is over and its record is on disk."""

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """The search is over.

        Args:
            trials: numbers of the trials that will be measured again, the baseline (0) first.
            reserved_s: time the finals may take; None for unlimited.
        """

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        """What the chosen configuration changes is put back, knob by knob, to see what each is worth.

        Args:
            trial: number of the chosen trial.
            knobs: keys of the knobs that will be put back, each alone.
            left_s: time this may take; None for unlimited.
        """

    def notice(self, message: str) -> None:
        """One line worth reading: an interrupt was heard, compilation does not fit the budget, ..."""

    def finished(self, summary: Summary) -> None:
        """The verdict is on disk."""


class Masked(Listener):
    """A listener that is passed no secrets, wherever the message was worded.

    Args:
        listener: whom to tell.
        secrets: what must not be told.
    """

    def __init__(self, listener: Listener, secrets: Secrets) -> None:
        self._secrets = secrets
        for name in vars(Listener):
            if not name.startswith("_") and name != "notice":
                setattr(self, name, getattr(listener, name))
        self._notice = listener.notice

    def notice(self, message: str) -> None:
        """Passes a message on, masked."""
        self._notice(self._secrets.text(message))
