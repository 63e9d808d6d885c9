"""Reads each trial from the journal: its knobs, rates, memory and outcome."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from autotune.search.rates.memory import HOST_KNOBS, Peak

MEASURED = "measured"  # user attribute of a trial: measurements besides the score, see `study.measured`
MOST_TRIALS = 150  # models are fitted to at most this many trials: a fit's time grows with the cube of their number
MEMORY, KEPT_FREE = "memory", "constraints.memory_free_frac"  # constraints that a trial violates if it needs too much memory


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One trial as the models use it.

    Attributes:
        params: the trial's searched knobs with their values.
        score: what the study maximises; None without a measurement.
        rate: samples per second; None without a measurement.
        device_rate, loader_rate: samples per second of the device if loading took no time, and of the loader alone; None when
            unknown.
        is_shared: whether the loader and the step shared cores.
        is_rough: whether its numbers are less certain, because it was stopped early or reached no steady state.
        peak_bytes: peak memory; None when unknown.
        is_out: whether it ran out of memory or exceeded the memory constraint.
        is_host_out: whether it is the host's memory that ran out, including shared memory.
        may_win: whether it has a rate, is not rough and violates no constraint.
        is_running: whether it is still running.
        to_blame: knobs that may have made the trial fail; None for all knobs.
        metrics: metrics that the study limits, by name; None if there are none.
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
    is_host_out: bool = False
    may_win: bool = False
    is_running: bool = False
    to_blame: frozenset[str] | None = None
    metrics: Mapping[str, float] | None = None

    @property
    def suspected(self) -> Mapping[str, Any]:
        """The knobs that may have made the trial fail, with their values."""
        return {key: value for key, value in self.params.items() if self.to_blame is None or key in self.to_blame}

    @cached_property
    def names(self) -> frozenset[str]:
        """The keys of `params`."""
        return _interned(tuple(self.params))

    @cached_property
    def peak(self) -> Peak:
        """The trial's memory, for the memory model."""
        return Peak(params=self.params, peak_bytes=self.peak_bytes, is_out=self.is_out, is_host=self.is_host_out)


class Facts:
    """What the models need to know about all finished trials. The time to add a trial does not depend on their number.

    Attributes:
        trials: the trials.
        rated: the trials with a rate.
        by_rate: (negative rate, place in `rated`) of each trial in `rated`, the fastest first.
        failed: the trials that failed for a reason other than memory.
        peaks: for each combination of memory knobs, the latest trial's peak. Trials that ran out of memory have separate
            entries, and so have trials whose peak is unknown.
        num_out: number of trials that ran out of memory.
        names: the sets of knobs that trials have.
        values: (knob, value) for each value that a knob has in some trial.
    """

    def __init__(self) -> None:
        self.trials, self.rated, self.failed = list[Seen](), list[Seen](), list[Seen]()
        self.by_rate = list[tuple[float, int]]()
        self.peaks = dict[tuple[Any, ...], Peak]()
        self.num_out = 0
        self.names = set[frozenset[str]]()
        self.values = dict[tuple[str, Any], None]()

    def add(self, one: Seen) -> None:
        """Adds a trial."""
        self.trials.append(one)
        if one.rate is not None:
            bisect.insort(self.by_rate, (-one.rate, len(self.rated)))
            self.rated.append(one)
        elif _has_failed(one):
            self.failed.append(one)
        self.peaks[_peak_key(one)] = one.peak
        self.num_out += one.is_out
        self.names.add(one.names)
        self.values.update(dict.fromkeys(one.params.items()))


class Known:
    """The trials of a study in the order of their numbers, and what the models need to know about all of them.

    Valid until `History.seen` is called again.

    Attributes:
        first: finished trials, with lower numbers than all in `rest`.
        rest: the other trials; only a few if `first` holds the finished trials of a long study.
    """

    def __init__(self, rest: Iterable[Seen], first: Facts | None = None) -> None:
        self.first, self.rest = first or Facts(), list(rest)

    def __len__(self) -> int:
        return len(self.first.trials) + len(self.rest)

    def __iter__(self) -> Iterator[Seen]:
        return itertools.chain(self.first.trials, self.rest)

    @property
    def earliest(self) -> Seen | None:
        """The first trial; None if there is none."""
        return next(iter(self), None)

    @cached_property
    def running(self) -> list[Seen]:
        """The running trials."""
        return [one for one in self.rest if one.is_running]

    @property
    def num_finished(self) -> int:
        """Number of finished trials."""
        return len(self) - len(self.running)

    @cached_property
    def num_out(self) -> int:
        """Number of trials that ran out of memory."""
        return self.first.num_out + sum(one.is_out for one in self.rest)

    @cached_property
    def rated(self) -> list[Seen]:
        """The trials with a rate."""
        return [*self.first.rated, *(one for one in self.rest if one.rate is not None)]

    @cached_property
    def by_rate(self) -> list[tuple[float, int]]:
        """The negative rate and the place of each trial in `rated`, the fastest first."""
        return _by_rate(self.first.by_rate, self.rated)

    def fastest(self) -> Iterator[Seen]:
        """Yields the trials with a rate, the fastest first."""
        yield from (self.rated[place] for _, place in self.by_rate)

    @cached_property
    def failed(self) -> list[Seen]:
        """The trials that failed for a reason other than memory."""
        return [*self.first.failed, *filter(_has_failed, self.rest)]

    @cached_property
    def peaks(self) -> list[Peak]:
        """The values of `Facts.peaks`, over all trials."""
        return list((self.first.peaks | {_peak_key(one): one.peak for one in self.rest}).values())

    @property
    def values(self) -> Iterator[Mapping[str, Any]]:
        """Configurations that together contain every value that a knob has in any trial."""
        yield from ({key: value} for key, value in self.first.values)
        yield from (one.params for one in self.rest)

    def plus(self, more: Sequence[Seen]) -> Known:
        """Returns these trials together with `more`."""
        return Known([*self.rest, *more], self.first) if more else self

    def within(self, keys: Collection[str]) -> Known:
        """Returns the trials that have no other knobs than these."""
        names = {*self.first.names, *(one.names for one in self.rest)}
        allowed = {each for each in names if each <= set(keys)}
        return self if allowed == names else Known(one for one in self if one.names in allowed)

    def measured(self, more: Sequence[Seen] = (), *, most: int) -> list[Seen]:
        """Returns the trials with a rate, in their original order; a selection if there are more than `most`.

        A third of the selection are the fastest trials, a third the latest, and the rest are evenly spaced in order of rate.

        Args:
            more: trials to be added after the last one.
            most: maximum number of trials.
        """
        rated = [*self.rated, *more]
        return thinned(rated, _by_rate(self.by_rate, rated), most=most)


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
        self._first, self._num_first = Facts(), 0
        self._last_first: FrozenTrial | None = None
        self._others: dict[int, tuple[FrozenTrial, Seen]] = {}  # the other trials
        self.num_rates = 0
        self.ratios: tuple[float, float] | None = None

    def seen(self, study: optuna.Study, *, without: int | None = None) -> Known:
        """Returns the complete trials, and the running ones without trial number `without`, which is being proposed."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING))
        num = self._num_first
        if study.study_name != self._study or (num and trials[num - 1 : num] != [self._last_first]):
            self._study = study.study_name
            self._begin()
        for trial in itertools.takewhile(_is_over, trials[self._num_first :]):
            self._num_first, self._last_first = self._num_first + 1, trial
            if trial.params:
                self._first.add(self._once(trial))
        others = [trial for trial in trials[self._num_first :] if trial.params and (_is_over(trial) or trial.number != without)]
        self._others = {trial.number: (trial, self._once(trial)) for trial in others}
        return Known((one for _, one in self._others.values()), self._first)

    def _once(self, trial: FrozenTrial) -> Seen:
        """Reads a trial, or returns what was read before if the trial has not changed since."""
        before, found = self._others.get(trial.number, (None, None))
        if found is None or (found.is_running and before is not trial):
            return self._read(trial) if _is_over(trial) else Seen(params=trial.params, is_running=True)
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


def thinned(rated: Sequence[Seen], by_rate: Sequence[tuple[float, int]], *, most: int) -> list[Seen]:
    """Returns the selection that `Known.measured` describes; `rated` and `by_rate` are as in `Known`."""
    third, num = most // 3, len(rated)
    if num <= most:
        return list(rated)
    kept = {*(place for _, place in by_rate[:third]), *range(num - third, num)}
    ranks = [bisect.bisect_left(by_rate, (-(rated[place].rate or 0.0), place)) for place in kept]
    others, num_others = np.delete(np.arange(num), ranks), most - len(kept)
    chosen = others[np.arange(num_others) * len(others) // num_others].tolist()
    return [rated[place] for place in sorted({*kept, *(by_rate[rank][1] for rank in chosen)})]


def _has_failed(one: Seen) -> bool:
    return one.rate is None and not one.is_out and not one.is_running


def _peak_key(one: Seen) -> tuple[Any, ...]:
    host = tuple(map(one.params.get, HOST_KNOBS)) if one.is_host_out else None
    return one.is_out, bool(one.peak_bytes) and not one.is_out, host, one.peak.kind


def _by_rate(sorted_before: Sequence[tuple[float, int]], rated: Sequence[Seen]) -> list[tuple[float, int]]:
    """Returns (negative rate, place) of each trial, the fastest first; `sorted_before` is the result for the first trials."""
    found = list(sorted_before)
    for place, one in enumerate(rated[len(sorted_before) :], len(sorted_before)):
        bisect.insort(found, (-(one.rate or 0.0), place))  # in a long study, `sorted` takes as long as hundreds of insertions
    return found


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
        is_out=MEMORY in broken or KEPT_FREE in stored.get("violated", ()),
        is_host_out=MEMORY in broken and stored.get("outcome") == "host_oom",
        to_blame=frozenset(stored["to_blame"]) if stored.get("to_blame") else None,
        metrics=stored.get("metrics"),
        may_win=is_measured and not broken and stored.get("outcome") in (None, "ok"),
    )


def _score(trial: FrozenTrial, stored: Mapping[str, Any]) -> float | None:
    """Returns the stored score, else Optuna's value, which is the study's worst score if the trial cannot win."""
    score = stored.get("score")
    return score if score is not None or not trial.values else trial.values[0]


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
