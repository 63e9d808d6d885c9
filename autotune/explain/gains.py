"""Computes how much a change would gain: an estimate, its interval, and whether it is a bound, predicted or measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bound", "floor", "predicted", "measured"]
LEAST_GAIN = 0.03  # smaller gains are not claimed
LEAST_STEP_FRAC = 0.02  # share of a step that is assumed to remain, no matter how much of it is removed


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much faster training would be, as fractions: 0.38 for 38 % more samples per second.

    Attributes:
        low, high: interval; the true gain should lie inside in nineteen of twenty cases.
        mid: best estimate.
        kind: "bound" if no change can gain more than `high`; "floor" if removing the cost gains at least `low`; "predicted"
            from a model or from other trials; "measured" side by side.
    """

    low: float
    mid: float
    high: float
    kind: Kind

    def as_json(self) -> dict[str, Any]:
        """Returns the gain as plain JSON values."""
        return {"low": self.low, "mid": self.mid, "high": self.high, "kind": self.kind}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Gain:
        """Returns the gain that `as_json` wrote."""
        return cls(low=float(raw["low"]), mid=float(raw["mid"]), high=float(raw["high"]), kind=raw["kind"])

    def holds(self, measured: float) -> bool:
        """Returns whether a measured gain lies inside the interval."""
        return self.low <= measured <= self.high


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Seconds a step that a change would save: at least, probably, at most."""

    low: float
    mid: float
    high: float


def gain_of(step_s: float, saved: Saved, kind: Kind) -> Gain:
    """Returns the gain if a step that takes `step_s` seconds became shorter by `saved`."""

    def gain(seconds: float) -> float:
        return step_s / max(step_s - seconds, LEAST_STEP_FRAC * step_s) - 1

    return Gain(low=gain(saved.low), mid=gain(saved.mid), high=gain(saved.high), kind=kind)


def gain_of_ratio(ratio: float, half: float, kind: Kind) -> Gain:
    """Returns the gain for a ratio of two rates; `half` is the half-width of the interval of its logarithm."""
    return Gain(low=ratio * math.exp(-half) - 1, mid=ratio - 1, high=ratio * math.exp(half) - 1, kind=kind)
