"""Determines how much a configuration gains if one knob is changed, from the study's own trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.compare.effects import estimated, undoubted
from autotune.compare.noise import known_noise
from autotune.explain.gains import LEAST_GAIN, Gain, measured_gain_of
from autotune.records import Kind, Knobs, KnobValue, TrialRecord
from autotune.space import ResolvedSpace
from autotune.stats import Noise, log_mean_interval
from autotune.trials.configurations import configuration_key

# Assumed spread of a rate from one fresh process to the next, used until repeated measurements show the real spread. Measured
# spreads: 3.9 % in six finals on an H200, and 1 to 9 % (median 3.8 %) for fourteen programs on two CPU cores.
USUAL_NOISE = Noise(spread=0.04, freedom=2.0)
MEASURING = (Kind.baseline, Kind.search, Kind.final, Kind.attribution)  # trials whose rates show how fast a configuration is
# A value is refuted if a trial with it has less than this share of the most similar trial's rate, even if the two trials differ
# in other knobs.
HALVED = 0.5
NORMAL_95 = 2.2  # half-width of a 95 % interval with few degrees of freedom, in standard errors


def noise_or_usual(records: Sequence[TrialRecord], earlier: Noise | None) -> Noise:
    """Returns the spread of one measurement from process to process, from this and earlier studies, or else USUAL_NOISE."""
    return known_noise(records, earlier) or USUAL_NOISE


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The effects of setting one more knob of a measured configuration, according to the study's trials."""

    record: TrialRecord
    records: Sequence[TrialRecord]
    space: ResolvedSpace
    noise: Noise

    def gain(self, key: str, value: KnobValue) -> Gain | None:
        """Returns the gain from setting a knob.

        The gain is measured if the study ran both configurations, and otherwise predicted from similar trials. None if neither
        is possible.
        """
        was, changed = self.record.changed, self._changed(key, value)
        here, there = _scores(was, self.records), _scores(changed, self.records)
        if here and there:
            half = NORMAL_95 * self.noise.spread * math.sqrt(1 / len(here) + 1 / len(there))
            return measured_gain_of(_mean(there) / _mean(here), half)
        lost = [other for other in {**was, **changed} if other != key and changed.get(other) != was.get(other)]
        if ratio := estimated(changed, {key: lost}, self.records, self.noise, before=was).get(key):
            low, high = ratio.ci or (ratio.ratio, ratio.ratio)
            return Gain(low=low - 1, mid=ratio.ratio - 1, high=high - 1, kind="predicted")
        return None

    def is_refuted(self, key: str, value: KnobValue | None) -> bool:
        """Returns whether trials with this value failed or were no faster than the most similar trials with the old value.

        Returns False if a trial with the value was faster, or if `gain` returns a measured gain. If a trial also differs from
        the most similar one in other knobs, these knobs may have caused the loss. Such a trial counts only if it did not fail
        and its rate is less than HALVED times the rate of the most similar one.
        """
        ran = [one for one in undoubted(self.records) if not one.outcome.is_no_answer and one.is_of_program]
        having = [one for one in ran if one.kind in (*MEASURING, Kind.check) and one.knobs.get(key) == value]
        if value is None or not having or _scores(self._changed(key, value), self.records):
            return False
        rivals = [
            one for one in ran if one.kind in MEASURING and one.score and one.knobs.get(key) == self.record.knobs.get(key)
        ]
        compared = [each for one in having for each in self._results(one, ran, rivals, key)]
        is_faster = any(times >= 1 + LEAST_GAIN for times, _ in compared)
        return not is_faster and any(num_others == 0 or 0 < times < HALVED for times, num_others in compared)

    def _results(
        self, one: TrialRecord, ran: Sequence[TrialRecord], rivals: Sequence[TrialRecord], key: str
    ) -> list[tuple[float, int]]:
        """Returns [(relative rate, number of other knobs)], as `_compared` does; [] for a check without a rate to compare with.

        A check is compared with the checks of the same round that have the knob's old value. Search trials do not count, since
        the machine may have been faster or slower during the search.
        """
        if one.kind is not Kind.check or not one.score:
            return [_compared(one, rivals, key)]
        was = self.record.knobs.get(key)
        beside = [each for each in ran if each.kind is Kind.check and each.round == one.round and each.knobs.get(key) == was]
        scores = [each.score for each in beside if each.score]
        return [(one.score / _mean(scores), 0)] if scores else []

    def _changed(self, key: str, value: KnobValue) -> Knobs:
        """Returns the knobs in which the configuration differs from the baseline after one more knob is set."""
        return self.space.changed(configuration_with(self.record, key, value, self.space))


def _compared(one: TrialRecord, rivals: Sequence[TrialRecord], key: str) -> tuple[float, int]:
    """Returns a trial's rate relative to the rival that differs in the fewest other knobs, and the number of these knobs.

    The relative rate is 0 if the trial failed, and infinite without a rival.
    """

    def distance(rival: TrialRecord) -> tuple[int, float]:
        others = {*one.changed, *rival.changed} - {key}
        return sum(one.changed.get(other) != rival.changed.get(other) for other in others), -(rival.score or 0.0)

    nearest = min(rivals, key=distance, default=None)
    if nearest is None:
        return (math.inf if one.score else 0.0), 0
    return (one.score or 0.0) / (nearest.score or 1.0), distance(nearest)[0]


def configuration_with(record: TrialRecord, key: str, value: KnobValue, space: ResolvedSpace) -> Knobs:
    """Returns the values of all active knobs after one more knob of a trial is set."""
    return space.active({**space.reference, **record.knobs, key: value})


def _scores(changed: Knobs, records: Sequence[TrialRecord]) -> list[float]:
    """Returns the scores of all usable measurements of a configuration."""
    key = configuration_key(changed)
    same = [one for one in records if one.kind is not Kind.check and configuration_key(one.changed) == key]
    return [one.score for one in undoubted(same) if one.score and one.outcome.may_win]


def _mean(scores: Sequence[float]) -> float:
    return log_mean_interval(scores)[0] if len(scores) > 1 else scores[0]
