"""Whether a configuration fits the memory: a line in the batch size for each way of computing, and what was seen to run out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.search.rates.coding import BATCH, Array

CLASS_KNOBS = ("precision.amp", "compile.mode", "memory.activation_checkpointing")  # what changes the bytes of a sample
WORKERS, THREADS = "loader.num_workers", "threads.intra"
IN_PROCESS = "batches are made in the process"  # a class on a CPU, where the loader without workers takes of the same memory
# Share of a sample's bytes that these ways of computing are expected to spare.
SPARED = {
    ("precision.amp", "'bf16'"): 0.35,
    ("precision.amp", "'fp16'"): 0.35,
    ("memory.activation_checkpointing", "True"): 0.4,
    (IN_PROCESS, "False"): 0.2,
}
FITS_FRAC = 0.97  # of the memory there is: above it a trial counts as not fitting
LEAST_CHANCE = 0.25  # to fit, below which nothing is tried; above it, hopes count by the chance: an unsure line forbids nothing
SAFE_FRAC = 0.93  # of the memory: what a batch that is to fill it is expected to take at most
NOISE_FRAC = 0.01  # of the memory: allocators round, and peaks are sampled on a CPU; repeats differed by 0.1 to 2 %
PROCESS_BYTES = 0.95e9  # data of a process on a CPU that has imported torch and trains next to nothing
FIXED_FRAC, FIXED_SPREAD = 0.3, 0.4  # share of a trial's own memory that does not grow with the batch, before two batches tell
CLASS_SPREAD = 0.4  # of the bytes of a sample and of the rest, from one way of computing to another
PROCESS_SPREAD, MOST_PROCESS_FRAC = 0.1, 0.95  # how far off that may be, a share of it; what it is of the least trial at most
BEYOND_FRAC, BEYOND_SPREAD = 1.1, 0.1  # of the memory: what ran out took about so much, or any more


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
        is_cpu: whether it is that of the processes, rather than a device's.
    """

    def __init__(self, peaks: Sequence[Peak], *, capacity_bytes: float | None, is_cpu: bool = False) -> None:
        self._is_cpu = is_cpu
        self._out = [peak for peak in peaks if peak.is_out]
        self._in = [peak for peak in peaks if peak.peak_bytes and not peak.is_out and BATCH in peak.params]
        self._chances: dict[tuple[Any, ...], float] = {}
        self._values = sorted({*SPARED, *(value for peak in peaks for value in self._values_of(peak.params))})
        self._is_known = bool(self._in) and capacity_bytes is not None
        if not self._is_known or capacity_bytes is None:
            return
        self._process_frac = PROCESS_BYTES / capacity_bytes if is_cpu else 0.0
        self._unit = max(float(peak.params[BATCH]) for peak in self._in)
        shares = np.array([peak.peak_bytes for peak in self._in], dtype=float) / capacity_bytes
        self._fit([peak.params for peak in self._in], shares, np.full(len(shares), NOISE_FRAC))
        # What ran out took more than there is, however little the line gave it: as if it had been seen a little above.
        wrong = [peak.params for peak in self._out if BATCH in peak.params and self.fraction(peak.params)[0] < BEYOND_FRAC]
        if wrong:
            params = [*(peak.params for peak in self._in), *wrong]
            noise = np.array([NOISE_FRAC] * len(shares) + [BEYOND_SPREAD] * len(wrong))
            self._fit(params, np.concatenate([shares, np.full(len(wrong), BEYOND_FRAC)]), noise)

    def fraction(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the share of the memory that a configuration is expected to take, and its standard deviation.

        Both are NaN where nothing is known.
        """
        if not self._is_known or BATCH not in params:
            return math.nan, math.nan
        row = self._row(params)
        variance = max(0.0, float(row @ self._covariance @ row)) + NOISE_FRAC**2
        unseen = sum(value not in self._values for value in self._values_of(params))
        variance += unseen * self._own_variance * (row[1] ** 2 + 1 / 4)
        return float(row @ self._weights), math.sqrt(variance)

    def chance(self, params: Mapping[str, Any]) -> float:
        """Returns how probable it is that a configuration fits.

        It is 0 where as much is known to run out, else 1 where as much is known to fit, or nothing is known.
        """
        key = (*self._values_of(params), params.get(BATCH), params.get(THREADS))  # thousands differ in nothing else
        if key not in self._chances:
            self._chances[key] = self._chance(params)
        return self._chances[key]

    def fits(self, params: Mapping[str, Any]) -> bool:
        """Returns whether a configuration more probably fits than not."""
        return self.chance(params) >= 1 / 2

    def fills(self, params: Mapping[str, Any], larger: Sequence[int]) -> int | None:
        """Returns the largest of the larger batch sizes that safely fits; None where none does, or all of them do.

        Args:
            params: a configuration.
            larger: batch sizes.
        """
        safe = [batch for batch in larger if self.fraction({**params, BATCH: batch})[0] <= SAFE_FRAC]
        safe = [batch for batch in safe if self.fits({**params, BATCH: batch})]
        return max(safe) if safe and len(safe) < len(larger) else None

    def is_known_out(self, params: Mapping[str, Any]) -> bool:
        """Returns whether what ran out of memory computes as a configuration does, with no larger batch and threads."""
        return any(self._takes_no_less(params, out.params) for out in self._out)

    def _chance(self, params: Mapping[str, Any]) -> float:
        if self.is_known_out(params):
            return 0.0
        share, spread = self.fraction(params)
        if math.isnan(share) or any(self._takes_no_less(fitted.params, params) for fitted in self._in):
            return 1.0
        return (1 + math.erf((FITS_FRAC - share) / spread / math.sqrt(2))) / 2

    def _takes_no_less(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Returns whether one of two configurations that compute alike takes at least the memory of the other."""
        if self._values_of(one) != self._values_of(other) or one.get(BATCH, 0) < other.get(BATCH, 0):
            return False
        return not self._is_cpu or one.get(THREADS, 0) >= other.get(THREADS, 0)

    def _values_of(self, params: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Returns the values of what changes the bytes of a sample."""
        values = [(key, repr(params[key])) for key in CLASS_KNOBS if key in params]
        if self._is_cpu and WORKERS in params:
            values.append((IN_PROCESS, repr(params[WORKERS] == 0)))
        return values

    def _row(self, params: Mapping[str, Any]) -> Array:
        batch, own = float(params[BATCH]) / self._unit, set(self._values_of(params))
        marks = [float(value in own) for value in self._values]
        return np.array([1.0, batch, *marks, *(batch * mark for mark in marks)])

    def _fit(self, params: Sequence[Mapping[str, Any]], shares: Array, noise: Array) -> None:
        rows = np.array([self._row(one) for one in params])
        level = float(np.max(shares))
        process = min(self._process_frac, MOST_PROCESS_FRAC * float(np.min(shares)))
        of_trial = level - process
        growing = (1 - FIXED_FRAC) * of_trial
        spread = FIXED_SPREAD * of_trial + PROCESS_SPREAD * process
        self._own_variance = (CLASS_SPREAD * of_trial) ** 2
        own = np.full(len(self._values), self._own_variance)
        spared = np.array([SPARED.get(value, 0.0) * growing for value in self._values])
        expected = np.concatenate([[process + FIXED_FRAC * of_trial, growing], 0 * own, -spared])
        variances = np.concatenate([[spread**2] * 2, own / 4, own])
        precision = np.diag(1 / variances) + (rows.T / noise**2) @ rows
        self._covariance = np.linalg.inv(precision)
        self._weights = expected + self._covariance @ (rows.T / noise**2) @ (shares - rows @ expected)
