"""Finds out from a study's own trials what changing one knob of a configuration gains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.compare.effects import estimated
from autotune.compare.noise import noise_of, rounds_of
from autotune.explain.evidence import Effect
from autotune.explain.gains import Gain, gain_of_ratio
from autotune.records import Kind, Knobs, KnobValue, TrialRecord
from autotune.space import ResolvedSpace
from autotune.stats import Noise, log_mean_interval, pooled
from autotune.trials.session import configuration_key

USUAL_NOISE = Noise(spread=0.02, freedom=3.0)  # assumed for a measurement in a fresh process if no rounds have shown its spread
NORMAL_95 = 2.2  # half-width of a 95 % interval with few degrees of freedom, in standard errors


def noise_known(records: Sequence[TrialRecord], earlier: Noise | None) -> Noise:
    """Returns the spread of one measurement from process to process, as far as this study and earlier ones know it."""
    return pooled([noise_of(rounds_of(records)), earlier]) or USUAL_NOISE


def effects(record: TrialRecord, records: Sequence[TrialRecord], space: ResolvedSpace, noise: Noise) -> Effect:
    """Returns a function (knob, value) -> what setting this knob in addition gains.

    The gain is measured if the study ran both configurations. Otherwise it is predicted from trials near them, or None if that
    is impossible.

    Args:
        record: the configuration to change.
        records: all trials of the study.
        space: the study's search space.
        noise: spread of one measurement.
    """
    here = _logs(record.changed, records)

    def effect(key: str, value: KnobValue) -> Gain | None:
        changed = with_knob(record, key, value, space)
        there = _logs(changed, records)
        if here and there:
            half = NORMAL_95 * noise.spread * math.sqrt(1 / len(here) + 1 / len(there))
            return gain_of_ratio(_mean(there) / _mean(here), half, "measured")
        lost = [other for other in changed if other != key and changed.get(other) != record.changed.get(other)]
        if ratio := estimated(changed, {key: lost}, records, noise).get(key):
            low, high = ratio.ci or (ratio.ratio, ratio.ratio)
            return Gain(low=low - 1, mid=ratio.ratio - 1, high=high - 1, kind="predicted")
        return None

    return effect


def with_knob(record: TrialRecord, key: str, value: KnobValue, space: ResolvedSpace) -> Knobs:
    """Returns a configuration's changes to the baseline with one more knob set."""
    return space.changed(configuration_with(record, key, value, space))


def configuration_with(record: TrialRecord, key: str, value: KnobValue, space: ResolvedSpace) -> Knobs:
    """Returns a full configuration with one more knob set."""
    return space.active({**space.reference, **record.knobs, key: value})


def _logs(changed: Knobs, records: Sequence[TrialRecord]) -> list[float]:
    """Returns the scores of all usable measurements of a configuration."""
    key = configuration_key(changed)
    able = [one for one in records if one.kind is not Kind.check and one.score and one.outcome.may_win]
    return [one.score for one in able if one.score and configuration_key(one.changed) == key]


def _mean(scores: Sequence[float]) -> float:
    return log_mean_interval(scores)[0] if len(scores) > 1 else scores[0]
