"""Predicts whether a configuration fits the memory: linear in the batch size per class of knobs, and by past failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.search.rates.coding import BATCH, Array

# Knobs that change the bytes of a sample or of the model.
CLASS_KNOBS = (
    *("precision.amp", "compile.mode", "memory.activation_checkpointing"),
    *("parallel.strategy", "parallel.reshard_after_forward"),
)
WORKERS, THREADS = "loader.num_workers", "threads.intra"
IN_PROCESS = "batches are made in the process"  # a class on a CPU, where a loader without workers shares the process's memory
# Share of a sample's bytes that these values are expected to save.
SPARED = {
    ("precision.amp", "'bf16'"): 0.35,
    ("precision.amp", "'fp16'"): 0.35,
    ("memory.activation_checkpointing", "True"): 0.4,
    (IN_PROCESS, "False"): 0.2,
}
FITS_FRAC = 0.97  # of the memory: above it a trial counts as not fitting
SAFE_CHANCE = 0.75  # least chance to fit for an initial configuration
LEAST_CHANCE = 0.15  # least chance to fit for any proposal, however large its gain
SAFE_FRAC = 0.93  # of the memory: the most that a batch meant to fill it should take, with a chance of one half
NOISE_FRAC = 0.02  # of the memory: allocators round, and peaks are sampled on a CPU; repeats differed by 0.1 to 2 %
PROCESS_BYTES = 0.95e9  # memory of a CPU process that has imported torch and trains next to nothing
PROCESS_SPREAD, MOST_PROCESS_FRAC = 0.1, 0.95  # its relative spread; its largest share of the smallest trial
FIXED_FRAC, FIXED_SPREAD = 0.3, 0.4  # prior share of a trial's own memory that does not grow with the batch
CLASS_SPREAD = 0.3  # of the bytes of a sample between classes, besides the expected savings
CLASS_FIXED_SPREAD = 0.1  # of a trial's own memory: the same for the part that does not grow
# GROWING: the part of the largest trial that grows with the batch; a priori all scales are equally probable.
SAME = 1e-3  # spread of a model's own scale, relative to 1
LEAST_LIKELY = 1e-6  # that a fitting configuration runs out of memory: other programs may take memory, too
GROWING = np.geomspace(0.001, 1.2, 40)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One trial's memory.

    Attributes:
        params: its configuration.
        peak_bytes: its peak; None if unknown.
        is_out: whether it ran out.
    """

    params: Mapping[str, Any]
    peak_bytes: float | None
    is_out: bool


class MemoryModel:
    """Models memory as M(batch) = a + m batch, with a and m per class of knobs: a mixture of linear models, one per scale of m.

    One batch size says little about m, and m cannot be negative. So each scale of m has a conjugate model for the rest, and
    the trials determine how probable each scale is. Trials that ran out rule out scales by which they would fit.

    Args:
        peaks: past trials.
        capacity_bytes: memory that a trial may fill; None to use only the rule of past trials.
        is_cpu: whether it is the memory of the processes rather than a device's.
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
        self._fit(np.array([peak.peak_bytes for peak in self._in], dtype=float) / capacity_bytes)

    def fraction(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the share of the memory that a configuration is expected to take, and its standard deviation.

        Both are NaN if nothing is known.
        """
        if not self._is_known or BATCH not in params:
            return math.nan, math.nan
        means, variances = self._shares(params)
        mean = float(self._belief @ means)
        return mean, math.sqrt(float(self._belief @ (variances + (means - mean) ** 2)))

    def chance(self, params: Mapping[str, Any]) -> float:
        """Returns the probability that a configuration fits.

        It is 0 if one that needs no more is known to run out, else 1 if one that needs as much fitted, or nothing is known.
        """
        key = (*self._values_of(params), params.get(BATCH), params.get(THREADS))  # thousands of configurations share a key
        if key not in self._chances:
            self._chances[key] = self._chance(params)
        return self._chances[key]

    def fits(self, params: Mapping[str, Any]) -> bool:
        """Whether a configuration is likely enough to fit to be tried as an initial configuration."""
        return self.chance(params) >= SAFE_CHANCE

    def fills(self, params: Mapping[str, Any], larger: Sequence[int]) -> int | None:
        """Returns the largest of the larger batch sizes that safely fits; None if none does, or all of them do.

        Args:
            params: a configuration.
            larger: batch sizes.
        """
        safe = [batch for batch in larger if self._is_safe({**params, BATCH: batch})]
        return max(safe) if safe and len(safe) < len(larger) else None

    def _is_safe(self, params: Mapping[str, Any]) -> bool:
        return self._is_known and BATCH in params and self.fits(params) and self._below(params, SAFE_FRAC) >= 1 / 2

    def is_known_out(self, params: Mapping[str, Any]) -> bool:
        """Whether a trial of the same class ran out of memory with no larger a batch."""
        return any(self._takes_no_less(params, out.params) for out in self._out)

    def _chance(self, params: Mapping[str, Any]) -> float:
        if self.is_known_out(params):
            return 0.0
        is_in = any(self._takes_no_less(one.params, params) and self._has_threads_of(one.params, params) for one in self._in)
        if is_in or not self._is_known or BATCH not in params:
            return 1.0
        return self._below(params, FITS_FRAC)

    def _below(self, params: Mapping[str, Any], frac: float) -> float:
        """Returns the probability that a configuration takes at most a share of the memory."""
        means, variances = self._shares(params)
        return float(self._belief @ _normal_cdf((frac - means) / np.sqrt(variances)))

    def _takes_no_less(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether both configurations are of the same class and `one` takes at least the memory of `other`."""
        return self._values_of(one) == self._values_of(other) and one.get(BATCH, 0) >= other.get(BATCH, 0)

    def _has_threads_of(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether `one` has at least as many threads as `other`: on a CPU, each takes a little memory."""
        return not self._is_cpu or one.get(THREADS, 0) >= other.get(THREADS, 0)

    def _values_of(self, params: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Returns the class of a configuration: its values that change the bytes of a sample or of the model."""
        values = [(key, repr(params[key])) for key in CLASS_KNOBS if key in params]
        if self._is_cpu and WORKERS in params:
            values.append((IN_PROCESS, repr(params[WORKERS] == 0)))
        return values

    def _rows(self, params: Mapping[str, Any]) -> Array:
        """Returns the row of a configuration in the model of each scale."""
        own = set(self._values_of(params))
        marks = np.array([float(value in own) for value in self._values])
        grown = float(params[BATCH]) / self._unit * self._growing[:, None]
        return np.hstack([np.ones_like(grown), grown, np.broadcast_to(marks, (len(grown), len(marks))), grown * marks])

    def _shares(self, params: Mapping[str, Any]) -> tuple[Array, Array]:
        """Returns mean and variance of the memory share that a configuration takes, for each scale."""
        rows = self._rows(params)
        variances = np.einsum("si,sij,sj->s", rows, self._covariances, rows)
        unseen = sum(value not in self._values for value in self._values_of(params))
        variances = variances + unseen * ((CLASS_SPREAD * rows[:, 1]) ** 2 + self._class_fixed**2) + NOISE_FRAC**2
        return np.einsum("si,si->s", rows, self._weights), variances

    def _fit(self, shares: Array) -> None:
        """Fits a conjugate linear model for each scale of the growing part, and computes each scale's probability."""
        level = float(np.max(shares))
        process = min(self._process_frac, MOST_PROCESS_FRAC * float(np.min(shares)))
        of_trial = level - process
        self._class_fixed = CLASS_FIXED_SPREAD * of_trial
        self._growing = GROWING * level
        own = np.ones(len(self._values))
        spared = np.array([SPARED.get(value, 0.0) for value in self._values])
        expected = np.concatenate([[process + FIXED_FRAC * of_trial, 1.0], 0 * own, -spared])
        fixed_spread = FIXED_SPREAD * of_trial + PROCESS_SPREAD * process
        spreads = np.concatenate([[fixed_spread, SAME], self._class_fixed * own, CLASS_SPREAD * own])
        rows = np.stack([self._rows(peak.params) for peak in self._in], axis=1)  # scale, trial, weight
        gain = rows * spreads**2
        covariance = gain @ rows.transpose(0, 2, 1) + NOISE_FRAC**2 * np.eye(len(shares))
        errors = shares - rows @ expected
        solved = np.linalg.solve(covariance, np.concatenate([errors[:, :, None], gain], axis=2))
        self._weights = expected + np.einsum("sti,st->si", gain, solved[:, :, 0])
        self._covariances = np.diag(spreads**2) - gain.transpose(0, 2, 1) @ solved[:, :, 1:]
        likelihoods = -0.5 * np.einsum("st,st->s", errors, solved[:, :, 0]) - 0.5 * np.linalg.slogdet(covariance)[1]
        belief = np.exp(likelihoods - likelihoods.max())
        self._belief = belief / belief.sum()
        for peak in self._out:
            if BATCH in peak.params:
                means, variances = self._shares(peak.params)
                belief = self._belief * np.maximum(_normal_cdf((means - 1) / np.sqrt(variances)), LEAST_LIKELY)
                self._belief = belief / belief.sum()


def _normal_cdf(values: Array) -> Array:
    return np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in values])
