"""Measures configurations of the search space several times each, so that searches can be replayed.

Every round measures all configurations once, in random order. So a recording that is cut off is still a fair sample, and slow
changes of the machine affect all configurations alike. Trials run as in a search, but slow ones are not stopped early.

A search ends with one of the best few configurations. Their rates may differ by less than repeated measurements of one of them.
So `record.repeats_of_best` measures the best few more often. The rounds that measure all configurations decide which ones are
the best few.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from typing import Any

from autotune.records import Kind, Knobs, StudyRecord, TrialRecord
from autotune.study.design import MIN_CONFIGURATIONS, configurations
from autotune.study.resuming import was_stopped
from autotune.trials.configurations import ConfigurationKey, configuration_key, first_of
from autotune.trials.session import Session

RECORDED = "recorded"  # `origin` of a recording's trials
MAX_CHANCES = 2  # maximum number of attempts at a measurement that is disturbed or cut off
MAX_BEST, BEST_FRAC = 5, 0.8  # the best few: at most this many configurations, each with at least this share of the best value

Place = tuple[ConfigurationKey, int]  # configuration and round


class Recording:
    """The measurements of a recording. Measurements of earlier runs count, so that only missing ones are made."""

    def __init__(self, session: Session) -> None:
        config = session.inputs.config
        self._session, self._config, self._seed = session, config, config.study.seed
        self._configurations, self._is_whole = configurations(
            session.resolved, session.host_context, most=self._config.record.configurations, seed=self._seed
        )

    def run(self) -> tuple[bool, str]:
        """Measures until the recording is complete or its time is used up; returns whether it is complete, and why it ended."""
        num, repeats, further = len(self._configurations), self._config.record.repeats, self._config.record.repeats_of_best
        self._session.listener.notice(
            f"{_of_all(num, repeats)}: "
            + ("the whole search space." if self._is_whole else "a sample of the search space.")
            + (f" The best few are then measured {further} more times each." if further else "")
            + (f" A replay needs at least {MIN_CONFIGURATIONS} configurations." if num < MIN_CONFIGURATIONS else "")
        )
        while todo := self._todo():
            for knobs, round_number in todo:
                if not self._is_time_for(knobs):
                    left, minutes = len(self._todo()), self._config.record.minutes
                    of = "measurements of the best few" if round_number > repeats else f"of {num * repeats} measurements"
                    return False, f"record.minutes={minutes:g} leaves no time for another trial: {left} {of} are missing"
                self._measure(knobs, round_number)
        return True, _of_all(num, repeats)

    def _measure(self, knobs: Knobs, round_number: int) -> None:
        changed = self._session.resolved.changed(knobs)
        first = first_of(self._session.records, changed)
        self._session.measure(
            knobs,
            self._why(round_number),
            origin=RECORDED,
            repeats=None if first is None else first.number,
            round_number=round_number,
        )

    def _todo(self) -> list[tuple[Knobs, int]]:
        """Returns the missing measurements as (configuration, round); the best few are measured again last."""
        num_all, further = self._config.record.repeats, self._config.record.repeats_of_best
        todo = self._missing(self._configurations, range(1, num_all + 1))
        return todo or (self._missing(self._best(num_all), range(num_all + 1, num_all + further + 1)) if further else [])

    def _missing(self, configurations: list[Knobs], rounds: range) -> list[tuple[Knobs, int]]:
        answered, chances = _counted(self._session.records)
        found = []
        for round_number in rounds:
            shuffled = list(configurations)
            random.Random(f"{self._seed} {round_number}").shuffle(shuffled)
            for knobs in shuffled:
                place = (self._key(knobs), round_number)
                if not answered[place] and chances[place] < MAX_CHANCES:
                    found.append((knobs, round_number))
        return found

    def _best(self, num_rounds: int) -> list[Knobs]:
        """Returns the best few configurations, best first, by their mean over the rounds that measure all configurations.

        As in a replay, a configuration is left out if at least half of its measurements may not win (`Outcome.may_win`). A
        stricter rule would drop the best configuration if one of three measurements was unsteady.
        """
        values: dict[ConfigurationKey, list[float | None]] = defaultdict(list)
        for record in self._session.records:
            if record.kind not in (Kind.baseline, Kind.search) or record.outcome.is_no_answer:
                continue
            if (record.round or 1) <= num_rounds:
                may_win = record.outcome.may_win and record.score is not None
                values[configuration_key(record.changed)].append(record.score if may_win else None)
        worth = {self._key(knobs): _worth(values[self._key(knobs)]) for knobs in self._configurations}
        ranked = sorted(self._configurations, key=lambda knobs: -worth[self._key(knobs)])[:MAX_BEST]
        least = BEST_FRAC * worth[self._key(ranked[0])]
        return [knobs for knobs in ranked if worth[self._key(knobs)] >= least > 0]

    def _why(self, round_number: int) -> str:
        num_all, further = self._config.record.repeats, self._config.record.repeats_of_best
        if round_number <= num_all:
            return f"round {round_number} of {num_all}"
        return f"round {round_number - num_all} of {further} of the best few"

    def _key(self, knobs: Knobs) -> ConfigurationKey:
        return configuration_key(self._session.resolved.changed(knobs))

    def _is_time_for(self, knobs: Knobs) -> bool:
        """Whether another trial fits into `record.minutes`; always True without that limit."""
        session, minutes = self._session, self._config.record.minutes
        if minutes is None:
            return True
        changed = session.resolved.changed(knobs)
        first = first_of(session.records, changed)
        expected_s = first.attempt_s if first else session.costs.expected_s(knobs, changed)
        return session.budget.spent_s - session.budget.before_s + expected_s <= minutes * 60


def _of_all(num: int, repeats: int) -> str:
    times = "once" if repeats == 1 else f"{repeats} times each"
    return f"{num} configurations are recorded, {times}" if num != 1 else f"one configuration is recorded, {times}"


def _worth(scores: list[float | None]) -> float:
    able = [score for score in scores if score is not None]
    return statistics.mean(able) if 2 * len(able) > len(scores) else 0.0


def _counted(records: list[TrialRecord]) -> tuple[Counter[Place], Counter[Place]]:
    """Returns, for each configuration and round, the number of measurements and of attempts that were disturbed or cut off."""
    answered: Counter[Place] = Counter()
    chances: Counter[Place] = Counter()
    for record in records:
        if record.kind not in (Kind.baseline, Kind.search):
            continue
        place = (configuration_key(record.changed), record.round or 1)  # trial 0 is the baseline's first round
        if not record.outcome.is_no_answer:
            answered[place] += 1
        elif not was_stopped(record):
            chances[place] += 1
    return answered, chances


def recorded(about: StudyRecord, records: list[TrialRecord]) -> dict[str, Any]:
    """Returns a recording's entry in the summary.

    {"configurations": number of configurations measured at least once, "repeats": wanted number of measurements of each,
    "trials": number of measured pairs (configuration, round)}
    """
    answered, _ = _counted(records)
    return {
        "configurations": len({key for key, _ in answered}),
        "repeats": about.recording["repeats"],
        "trials": sum(1 for count in answered.values() if count),
    }
