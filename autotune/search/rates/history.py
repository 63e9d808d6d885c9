"""Reads each trial from the journal: its knobs, rates, memory and outcome."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from autotune.search.rates.memory import Peak

MEASURED = "measured"  # user attribute of a trial: measurements besides the score, see `study.measured`
MEMORY_CONSTRAINTS = ("memory", "constraints.memory_free_frac")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One trial as the models use it.

    Attributes:
        params: the trial's searched knobs with their values.
        score: what the study maximises; None without a measurement.
        rate: samples per second; None without a measurement.
        device_rate, loader_rate: D and L; None when unknown.
        is_shared: whether the loader and the step shared cores.
        is_rough: whether its numbers are less certain, because it was stopped early or reached no steady state.
        peak_bytes: peak memory; None when unknown.
        is_out: whether it ran out of memory or exceeded the memory constraint.
        may_win: whether it is measured and violates no constraint.
        is_running: whether it is still running.
        to_blame: knobs that may have made the trial fail; None for all knobs.
    """

    params: Mapping[str, Any]
    score: float | None = None
    rate: float | None = None
    device_rate: float | None = None
    loader_rate: float | None = None
    is_shared: bool = False
    is_rough: bool = False
    peak_bytes: float | None = None
    is_out: bool = False
    may_win: bool = False
    is_running: bool = False
    to_blame: frozenset[str] | None = None

    @property
    def suspected(self) -> Mapping[str, Any]:
        """The knobs that may have made the trial fail, with their values."""
        return {key: value for key, value in self.params.items() if self.to_blame is None or key in self.to_blame}

    @cached_property
    def names(self) -> frozenset[str]:
        """The knobs."""
        return _interned(tuple(self.params))

    @cached_property
    def peak(self) -> Peak:
        """The trial's memory, for the memory model."""
        return Peak(params=self.params, peak_bytes=self.peak_bytes, is_out=self.is_out)


class History:
    """Reads the trials of a study. Finished trials do not change, so each is read only once.

    Attributes:
        num_rates: number of trials with a rate.
        ratios: smallest and largest ratio of a trial's score to its rate; None if there is none.
    """

    def __init__(self) -> None:
        self._study = ""
        self._begin()

    def _begin(self) -> None:
        # Finished trials before the first running one. Their positions do not change any more.
        self._first, self._num_first = list[Seen](), 0
        self._last_first: FrozenTrial | None = None
        self._finished: dict[int, Seen] = {}  # the other finished trials
        self.num_rates = 0
        self.ratios: tuple[float, float] | None = None

    def seen(self, study: optuna.Study, *, without: int | None = None) -> list[Seen]:
        """Returns the ended trials whose state is not FAIL, and the running trials except `without`, the proposed one."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING))
        num = self._num_first
        if study.study_name != self._study or (num and trials[num - 1 : num] != [self._last_first]):
            self._study = study.study_name
            self._begin()
        for trial in itertools.takewhile(_is_over, itertools.islice(trials, self._num_first, None)):
            self._num_first, self._last_first = self._num_first + 1, trial
            if trial.params:
                known = self._finished.pop(trial.number, None)
                self._first.append(known or self._read(trial))
        found = list(self._first)
        for trial in itertools.islice(trials, self._num_first, None):
            if _is_over(trial) and trial.params:
                if trial.number not in self._finished:
                    self._finished[trial.number] = self._read(trial)
                found.append(self._finished[trial.number])
            elif trial.number != without and trial.params:
                found.append(Seen(params=trial.params, is_running=True))
        return found

    def _read(self, trial: FrozenTrial) -> Seen:
        found = _finished(trial)
        self.num_rates += found.rate is not None
        if found.score and found.rate:
            ratio = found.score / found.rate
            low, high = self.ratios or (ratio, ratio)
            self.ratios = min(low, ratio), max(high, ratio)
        return found


@functools.cache
def _interned(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


def _is_over(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.COMPLETE


def thinned(known: Sequence[Seen], *, most: int) -> list[Seen]:
    """Returns at most `most` of the measured trials: the fastest, the latest and some others, in their original order."""
    if len(known) <= most:
        return list(known)
    third = most // 3
    by_rate = np.argsort([-(one.rate or 0.0) for one in known], kind="stable")
    is_kept = np.zeros(len(known), dtype=bool)
    is_kept[by_rate[:third]] = is_kept[-third:] = True
    others = by_rate[~is_kept[by_rate]]
    num = most - int(is_kept.sum())
    is_kept[others[np.arange(num) * len(others) // num]] = True
    return [known[place] for place in np.flatnonzero(is_kept).tolist()]


def _finished(trial: FrozenTrial) -> Seen:
    stored = trial.user_attrs.get(MEASURED) or {}
    broken = {name for name, violation in trial.constraints.items() if violation > 0}
    rate = _positive(stored.get("rate"))
    is_measured = rate is not None and not broken & {"memory", "works"}
    return Seen(
        params=trial.params,
        score=_score(trial, stored) if is_measured else None,
        rate=rate if is_measured else None,
        device_rate=_positive(stored.get("device_rate")) if is_measured else None,
        loader_rate=_positive(stored.get("loader_rate")) if is_measured else None,
        is_shared=stored.get("regime") == "shared",
        is_rough=stored.get("outcome") in ("raced", "unsteady"),
        peak_bytes=_positive(stored.get("peak_memory_bytes")),
        is_out=bool(broken & set(MEMORY_CONSTRAINTS)),
        to_blame=frozenset(stored["to_blame"]) if stored.get("to_blame") else None,
        may_win=is_measured and not broken and stored.get("outcome") in (None, "ok"),
    )


def _score(trial: FrozenTrial, stored: Mapping[str, Any]) -> float | None:
    """Returns the measured score. The value that Optuna has is the worst score of the study if the trial cannot win."""
    score = stored.get("score")
    return score if score is not None or not trial.values else trial.values[0]


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
