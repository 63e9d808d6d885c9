"""Computes how much a change would gain: an estimate, its interval, and whether it is a bound, predicted or measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["bound", "floor", "predicted", "measured"]
Saved = tuple[float, float, float]  # seconds of a step that a change would save: at least, probably, at most
LEAST_GAIN = 0.03  # smaller gains are not claimed
LEAST_STEP_FRAC = 0.02  # at least this share of a step is assumed to remain, no matter how much is removed


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much faster training would be, as fractions: 0.38 for 38 % more samples per second.

    Attributes:
        low, high: interval; it should contain the true gain in 19 of 20 cases.
        mid: best estimate.
        kind: "bound" if no change can gain more than `high`; "floor" if removing the cost gains at least `low`; "predicted"
            from a model or from other trials; "measured" by running both programs.
    """

    low: float
    mid: float
    high: float
    kind: Kind

    @property
    def width(self) -> float:
        """Width of the interval as a fraction of the rate: 0.3 for a gain of 50 % [30, 75]."""
        return (self.high - self.low) / (1 + self.mid)

    def holds(self, measured: float) -> bool:
        """Returns whether a measured gain lies inside the interval."""
        return self.low <= measured <= self.high


def gain_of(step_s: float, saved: Iterable[float], kind: Kind) -> Gain:
    """Returns the gain if a step of `step_s` seconds became shorter by `saved` seconds: at least, probably, at most."""
    low, mid, high = (step_s / max(step_s - seconds, LEAST_STEP_FRAC * step_s) - 1 for seconds in saved)
    return Gain(low=low, mid=mid, high=high, kind=kind)


def gain_of_part(whole: Gain, remaining: Saved, kind: Kind, *, limiting: float | None = None) -> Gain:
    """Returns the gain if only a part of a cost is removed.

    Args:
        whole: the gain if the whole cost is removed.
        remaining: share of the cost that remains: at most, usually, at least.
        kind: kind of the result.
        limiting: the share of its work that the limiting resource, such as the workers, spends on the cost. If it is 0.6,
            removing half of the cost saves 30 % of the step, but not more than removing the whole cost saves. None if the cost
            is simply a part of the step.
    """
    saved = [max(0.0, gain / (1 + gain)) for gain in (whole.low, whole.mid, whole.high)]  # as a share of the step
    parts = [(1 - left) * (each if limiting is None else limiting) for left, each in zip(remaining, saved, strict=True)]
    return gain_of(1.0, map(min, parts, saved), kind)


def measured_gain_of(ratio: float, half: float) -> Gain:
    """Returns the gain for a measured ratio of two rates; `half` is half the width of the interval of the ratio's logarithm."""
    return Gain(low=ratio * math.exp(-half) - 1, mid=ratio - 1, high=ratio * math.exp(half) - 1, kind="measured")
