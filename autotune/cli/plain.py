"""Shows a running study without a terminal: prints one line per event, only the verdict, or only the JSON document."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from autotune import wording
from autotune.cli import verdict
from autotune.cli.process_start import silence
from autotune.plain_text import plain
from autotune.quantities import bytes_text, clock_text, number_text, rate_with_interval_text, seconds_text
from autotune.records import THROUGHPUT, TIME, Kind, Knobs, StudyRecord, Summary, TrialRecord
from autotune.study import Listener
from autotune.trials.events import Outlook
from autotune.wording import aims_text, changes_phrase, counts_text, head_text, machine_text, objective_text, warm_start_text


class View(Listener):
    """Listener through which `run` shows a study."""

    def waiting(self, message: str) -> None:
        """Prints one line on standard error."""
        _warn(message)

    def close(self) -> None:
        """Releases the terminal. Called at the end of every study, even after an exception."""


class Quiet(View):
    """Prints only notices, on standard error. Standard output is reserved for the JSON document."""

    def notice(self, message: str) -> None:
        """Prints one line on standard error."""
        _warn(message)


class OnlyVerdict(Quiet):
    """Prints only notices, on standard error, and the verdict."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def finished(self, summary: Summary) -> None:
        """Prints the verdict."""
        for line in verdict.lines(summary, self._path):
            _say(line)


class PlainLines(OnlyVerdict):
    """Prints one line per event."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._is_announced = False
        self._left = ""

    def started(self, study: StudyRecord) -> None:
        """Prints the study's name, program, machine and budget. When called again, prints what is searched."""
        if not self._is_announced:
            _say(f"study  {study.name}: {study.title}")
            _say(f"machine  {machine_text(study.machine)}")
            _say(f"budget  {budget_text(study)}")
            if has_aims(study):
                _say(f"objective  {aims_text(study.objective, study.terms)}")
        elif study.space:
            _say(f"searching  {', '.join(sorted(study.space))}")
            if taken_over := warm_start_text(study.warm_start):
                _say(f"warm start  {taken_over}")
        self._is_announced = True

    def resumed(self, trials: Sequence[TrialRecord], spent_s: float) -> None:
        """Prints a line on the trials and the time of earlier runs."""
        counts = Counter(trial.outcome.value for trial in trials)
        there = "1 trial" if len(trials) == 1 else f"{len(trials)} trials"
        _say(f"resumed  {there} from earlier, {counts_text(counts)}; {seconds_text(spent_s)} already used")

    def planned(self, outlook: Outlook) -> None:
        """Prints how many search trials fit the budget."""
        _say(f"plan  {plan_text(outlook)}")

    def time_left(self, outlook: Outlook) -> None:
        """Stores the time left, for the line of the next trial."""
        self._left = left_text(outlook)

    def trial_started(self, number: int, kind: Kind, knobs: Knobs, why: str) -> None:
        """Prints what is tried and why, and how much of the budget is left."""
        left = f"  {self._left}" if self._left else ""
        _say(f"{number:04d}  {kind.value} starts  {changes_phrase(knobs)}{f' ({why})' if why else ''}{left}")

    def trial_ended(self, trial: TrialRecord) -> None:
        """Prints the trial's outcome and numbers."""
        numbers = [
            *(_objective(name, value, trial.unit) for name, value in trial.objectives.items() if name != THROUGHPUT),
            rate_with_interval_text(trial.value, trial.ci, trial.unit),
            f"D {number_text(trial.device_rate)}",
            f"L {number_text(trial.loader_rate)}",
            bytes_text(trial.peak_memory_bytes),
        ]
        said = numbers if trial.value is not None else []
        words = [f"{trial.number:04d}", trial.outcome.value, *said, seconds_text(trial.seconds), trial.reason]
        _say("  ".join(word for word in words if word))

    def finals_started(self, trials: Sequence[int], reserved_s: float | None) -> None:
        """Prints which trials are in the finals."""
        names = ", ".join(f"{n:04d}" for n in trials[1:])
        time = f", at most {seconds_text(reserved_s)}" if reserved_s else ""
        _say(f"finals  {'candidates' if len(trials) > 2 else 'candidate'} {names} and the baseline{time}")

    def attribution_started(self, trial: int, knobs: Sequence[str], left_s: float | None) -> None:
        """Prints which changes of the winner the ablation measures."""
        time = f", at most {seconds_text(left_s)}" if left_s else ""
        if knobs:
            _say(f"attribution  effects of the changes of {trial:04d}: {', '.join(sorted(knobs))}{time}")
        else:
            _say(f"attribution  measures {trial:04d} without the changes that seem to have no effect{time}")

    def notice(self, message: str) -> None:
        """Prints one line."""
        _say(f"note  {message}")


def has_aims(study: StudyRecord) -> bool:
    """Whether a study optimises or constrains anything besides throughput."""
    return study.objective != THROUGHPUT or bool(study.terms)


def _objective(name: str, value: float, unit: str) -> str:
    text = objective_text(name, value, unit)
    return f"{head_text(name, unit)} {text}" if name == TIME else text


def budget_text(study: StudyRecord) -> str:
    """Returns the budget of a study: "8 min", "30 trials", "8 min or 30 trials", "4 rounds or 5 min", "none"."""
    if wanted := study.verifies:
        return f"{wanted['rounds']} rounds or {seconds_text(wanted['minutes'] * 60)}"
    if wanted := study.recording:
        return f"at most {wanted['configurations']} configurations, {wanted['repeats']} times each"
    return wording.budget_text(study.budget_s, study.budget_trials) or "none"


def plan_text(outlook: Outlook) -> str:
    """Returns how many search trials fit and how long they take: "room for 24 trials in 3 min, ..."."""
    each = f"about {seconds_text(outlook.trial_s)} each"
    more = " more" if outlook.num_searched else ""
    if outlook.num_trials is None:
        return f"no limit was given:{more} trials until no improvement is expected, {each}"
    if not outlook.num_trials:
        return f"no room for {'one more' if more else 'a whole'} trial besides the finals, at {each}"
    trials = f"{outlook.num_trials}{more} trial{'' if outlook.num_trials == 1 else 's'}"
    needed_s = outlook.num_trials * outlook.trial_s
    if outlook.search_s is None or outlook.left_s is None:
        return f"{trials} at most in about {seconds_text(needed_s)}, {each}, then the finals"
    is_only = outlook.num_trials == 1 and not outlook.num_searched  # a single trial may use the finals' reserve
    search_s = needed_s if is_only else min(needed_s, outlook.search_s)
    rest_s = max(0.0, outlook.left_s - outlook.explain_s - max(search_s, outlook.search_s))
    time = f"{seconds_text(search_s)}, {each}"
    finals = f"then at most {seconds_text(rest_s)} for the finals"
    finals += f" and {seconds_text(outlook.explain_s)} to explain the result" if outlook.explain_s else ""
    return f"room for {trials} in {time}, fewer if little improvement is expected; {finals}"


def left_text(outlook: Outlook) -> str:
    """Returns what is left: "6:40 left, 3:52 to search"; without a time limit "12 trials left"; "" without any limit."""
    if outlook.left_s is None:
        num = outlook.num_trials
        return "" if num is None else f"{num} trial{'' if num == 1 else 's'} left"
    search = "" if outlook.search_s is None else f", {clock_text(outlook.search_s)} to search"
    return f"{clock_text(outlook.left_s)} left{search}"


def _warn(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"autotune: {plain(message)}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    try:
        print(plain(line), flush=True)  # a log followed with `tail -f` must not lag
    except OSError as error:  # the reader is gone or the disk is full: no reason to end the study
        silence(sys.stdout)
        Quiet().notice(
            f"standard output cannot be written ({error.strerror}): the study continues without it. "
            "`autotune show` shows the study."
        )
