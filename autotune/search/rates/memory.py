"""Whether a configuration fits the memory: a line in the batch size for each way of computing, and what was seen to run out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.search.rates.coding import BATCH, Array

# What changes the bytes of a sample, or those of the model.
CLASS_KNOBS = (
    *("precision.amp", "compile.mode", "memory.activation_checkpointing"),
    *("parallel.strategy", "parallel.reshard_after_forward"),
)
FITS_FRAC = 0.97  # of the memory there is: above it a trial counts as not fitting
NOISE_FRAC = 0.02  # of the memory: allocators round, and peaks are sampled on a CPU
FIXED_FRAC, FIXED_SPREAD = 0.3, 0.4  # share of a trial's memory that does not grow with the batch, before two batches tell
CLASS_SPREAD = 0.4  # of the bytes of a sample and of the rest, from one way of computing to another
BEYOND_FRAC = 1.1  # of the memory: what ran out took at least about so much


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One trial's memory.

    Attributes:
        params: its configuration.
        peak_bytes: what it took; None where it was not seen.
        is_out: whether it ran out.
    """

    params: Mapping[str, Any]
    peak_bytes: float | None
    is_out: bool


class MemoryModel:
    """M(batch) = a + m batch, a and m for each value of the knobs that change them: a conjugate linear model in bytes.

    Args:
        peaks: the trials there are.
        capacity_bytes: memory that a trial may fill; None leaves the rule of what was seen.
    """

    def __init__(self, peaks: Sequence[Peak], *, capacity_bytes: float | None) -> None:
        self._out = [peak for peak in peaks if peak.is_out]
        self._fits: dict[tuple[Any, ...], bool] = {}
        self._values = sorted({(key, repr(peak.params[key])) for peak in peaks for key in CLASS_KNOBS if key in peak.params})
        seen = [peak for peak in peaks if peak.peak_bytes and not peak.is_out and BATCH in peak.params]
        self._is_known = bool(seen) and capacity_bytes is not None
        if not self._is_known or capacity_bytes is None:
            return
        self._unit = max(float(peak.params[BATCH]) for peak in seen)
        self._fit([peak.params for peak in seen], np.array([peak.peak_bytes for peak in seen], dtype=float) / capacity_bytes)
        # What ran out took more than there is, however little the line gave it: as if it had been seen a little above.
        wrong = [peak.params for peak in self._out if BATCH in peak.params and self.fraction(peak.params)[0] < BEYOND_FRAC]
        if wrong:
            params = [*(peak.params for peak in seen), *wrong]
            shares = [float(peak.peak_bytes or 0) / capacity_bytes for peak in seen] + [BEYOND_FRAC] * len(wrong)
            self._fit(params, np.array(shares))

    def fraction(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the share of the memory that a configuration is expected to take, and its standard deviation.

        Both are NaN where nothing is known.
        """
        if not self._is_known or BATCH not in params:
            return math.nan, math.nan
        row = self._row(params)
        variance = max(0.0, float(row @ self._covariance @ row)) + NOISE_FRAC**2
        unseen = sum(key in params and (key, repr(params[key])) not in self._values for key in CLASS_KNOBS)
        variance += unseen * self._own_variance * (row[1] ** 2 + 1 / 4)
        return float(row @ self._weights), math.sqrt(variance)

    def fits(self, params: Mapping[str, Any]) -> bool:
        """Returns whether a configuration more probably fits than not, and is not known to run out."""
        key = tuple(params.get(knob) for knob in (BATCH, *CLASS_KNOBS))  # thousands of configurations differ in nothing else
        if key not in self._fits:
            share, _ = self.fraction(params)
            self._fits[key] = not self.is_known_out(params) and (math.isnan(share) or share <= FITS_FRAC)
        return self._fits[key]

    def is_known_out(self, params: Mapping[str, Any]) -> bool:
        """Returns whether a configuration computes as one that ran out of memory did, with as large a batch or a larger one."""
        return any(_is_alike(params, out.params) and params.get(BATCH, 0) >= out.params.get(BATCH, 0) for out in self._out)

    def _row(self, params: Mapping[str, Any]) -> Array:
        batch = float(params[BATCH]) / self._unit
        marks = [float(repr(params.get(key)) == value) for key, value in self._values]
        return np.array([1.0, batch, *marks, *(batch * mark for mark in marks)])

    def _fit(self, params: Sequence[Mapping[str, Any]], shares: Array) -> None:
        rows = np.array([self._row(one) for one in params])
        level = float(np.max(shares))
        self._own_variance = (CLASS_SPREAD * level) ** 2
        own = np.full(len(self._values), self._own_variance)
        expected = np.concatenate([[FIXED_FRAC * level, (1 - FIXED_FRAC) * level], 0 * own, 0 * own])
        variances = np.concatenate([[(FIXED_SPREAD * level) ** 2] * 2, own / 4, own])
        precision = np.diag(1 / variances) + rows.T @ rows / NOISE_FRAC**2
        self._covariance = np.linalg.inv(precision)
        self._weights = expected + self._covariance @ rows.T @ (shares - rows @ expected) / NOISE_FRAC**2


def _is_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in CLASS_KNOBS)
