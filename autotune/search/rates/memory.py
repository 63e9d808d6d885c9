"""Predicts whether a configuration fits the memory, from past outcomes and a model that is linear in the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtr

from autotune.search.rates.coding import BATCH, Array

# Knobs that change the bytes of a sample or of the model. Configurations with equal values of these knobs form a class.
CLASS_KNOBS = (
    *("precision.amp", "compile.mode", "memory.activation_checkpointing"),
    *("parallel.strategy", "parallel.reshard_after_forward"),
)
# Knobs whose values usually need the same memory, but one value may run out of memory where others do not. For example, if an
# attention kernel does not accept the inputs, a kernel that keeps the whole score matrix runs instead. They are not class
# knobs, because a class would then have too few trials. On one simulated transformer, 15 % of the trials ran out of memory if
# they were class knobs, and 2.5 % if they were not.
ALLOCATING_KNOBS = ("backend.sdpa", "memory.allocator")
# Knobs that change only the memory that does not grow with the batch, for example copies of the gradients.
FIXED_KNOBS = ("optimizer.implementation", "parallel.gradient_as_bucket_view", "backend.cudnn_benchmark")
WORKERS, THREADS = "loader.num_workers", "threads.intra"
HOST_KNOBS = (BATCH, WORKERS, "loader.prefetch_factor")  # larger values need more memory of the host
MEMORY_KNOBS = (*CLASS_KNOBS, *ALLOCATING_KNOBS, *FIXED_KNOBS, BATCH, WORKERS, THREADS)  # the knobs of `Peak.kind`
IN_PROCESS = "batches are made in the process"  # class value on a CPU without workers: the loader uses the process's memory
# Value -> share of a sample's bytes that it is expected to save.
SPARED = {
    ("precision.amp", "'bf16'"): 0.35,
    ("precision.amp", "'fp16'"): 0.35,
    ("memory.activation_checkpointing", "True"): 0.4,
    (IN_PROCESS, "False"): 0.2,
}
FITS_FRAC = 0.97  # share of the memory: a trial that is expected to need more does not fit
SAFE_CHANCE = 0.75  # minimum chance to fit for an initial configuration
LEAST_CHANCE = 0.15  # configurations with a smaller chance to fit are proposed only if no other one is promising
SAFE_FRAC = 0.93  # `fills` proposes only a batch that is more likely to stay within this share of the memory than to exceed it
# Standard deviation of a peak, as a share of the memory. Allocators round, and CPU peaks are sampled: repeats of a trial
# differed by 0.1 to 2 %.
NOISE_FRAC = 0.02
PROCESS_BYTES = 0.95e9  # memory of a CPU process that has imported torch and trains next to nothing
PROCESS_SPREAD = 0.1  # standard deviation of PROCESS_BYTES, as a share of it
MOST_PROCESS_FRAC = 0.95  # upper limit for PROCESS_BYTES, as a share of the smallest peak
# Below, "the largest training memory" is the largest peak of all trials. On a CPU, PROCESS_BYTES are subtracted from it.
# FIXED_FRAC and FIXED_SPREAD are the prior mean and standard deviation of the share of this memory that does not grow with the
# batch.
FIXED_FRAC, FIXED_SPREAD = 0.3, 0.4
# Each class value multiplies a sample's bytes by a factor. The logarithm of the factor has a prior mean, 0 or as in SPARED, and
# the standard deviation CLASS_SPREAD. Each value also adds bytes to the part that does not grow with the batch. They have the
# prior mean 0 and the standard deviation CLASS_FIXED_SPREAD, as a share of the largest training memory. On a CPU, each value of
# threads.intra adds bytes too (stacks, buffers of the kernels). Their standard deviation is at least THREADS_BYTES.
CLASS_SPREAD = 0.2
CLASS_FIXED_SPREAD = 0.1
THREADS_BYTES = 40e6
MOST_PEAKS = 100  # largest number of peaks that are fitted
NUM_STEPS = 5  # Gauss-Newton steps; the problem is not linear, because the factors of knobs multiply
MAX_FACTOR = 1.5  # largest change of the logarithm of a factor in one step
# Candidates for the memory that grows with the batch (m in MemoryModel), as shares of the largest peak. At first, all are
# equally probable.
GROWING = np.geomspace(0.001, 1.2, 40)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One trial's memory. `is_host`: whether it is the host's memory that ran out, including shared memory."""

    params: Mapping[str, Any]
    peak_bytes: float | None
    is_out: bool
    is_host: bool = False

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """The values of all knobs that affect memory."""
        return tuple(self.params.get(key) for key in MEMORY_KNOBS)


class MemoryModel:
    """Models memory as M(batch) = a + m batch, where values of knobs add to a and multiply m.

    m cannot be negative, and trials with the same batch size say little about m. So the model averages over many values of m,
    given as multiples of the largest peak (GROWING). For each value of m, the other weights are fitted by least squares with
    priors, and the trials determine how probable the value is. A trial that ran out of memory counts as needing at least all of
    the memory.

    Args:
        peaks: past trials.
        capacity_bytes: memory that a trial can fill; None to judge only by the outcomes of past trials.
        is_cpu: whether peaks and capacity are host memory of the processes rather than a device's memory.
    """

    def __init__(self, peaks: Sequence[Peak], *, capacity_bytes: float | None, is_cpu: bool = False) -> None:
        self._is_cpu = is_cpu
        # If the step runs on a GPU, a lack of host memory says nothing about the memory of the GPU.
        self._host_out = [peak.params for peak in peaks if peak.is_host and not is_cpu]
        peaks = [peak for peak in peaks if is_cpu or not peak.is_host]
        self._out = _distinct([peak for peak in peaks if peak.is_out])
        self._in = _distinct([peak for peak in peaks if peak.peak_bytes and not peak.is_out and BATCH in peak.params])
        self._in_of, self._out_of = self._by(self._class_of, self._in), self._by(self._out_class_of, self._out)
        self._chances: dict[tuple[Any, ...], float] = {}
        kinds = {peak.kind: peak for peak in peaks}.values()  # far fewer than trials
        values = {value for peak in kinds for value in self._class_of(peak.params)}
        self._values = sorted({*SPARED, *values})
        self._fixed_knobs = (*FIXED_KNOBS, THREADS) if is_cpu else FIXED_KNOBS  # each thread takes a little memory
        self._fixed = sorted({value for peak in kinds for value in _values(peak.params, self._fixed_knobs)})
        self._is_known = bool(self._in) and capacity_bytes is not None
        if not self._is_known or capacity_bytes is None:
            return
        self._process_frac = PROCESS_BYTES / capacity_bytes if is_cpu else 0.0
        self._unit = max(float(peak.params[BATCH]) for peak in self._in)
        self._fit(np.array([peak.peak_bytes for peak in self._in], dtype=float) / capacity_bytes, capacity_bytes)

    def fraction(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the share of the memory that a configuration is expected to need, and its standard deviation.

        Both are NaN if nothing is known.
        """
        if not self._is_known or BATCH not in params:
            return math.nan, math.nan
        means, variances = self._shares([params])
        mean = float(self._belief @ means[:, 0])
        return mean, math.sqrt(float(self._belief @ (variances[:, 0] + (means[:, 0] - mean) ** 2)))

    def chance(self, params: Mapping[str, Any]) -> float:
        """Returns the probability that a configuration fits.

        The probability is 0 if the configuration needs at least as much memory as a trial that ran out of memory. It is 1 if
        the configuration needs at most as much memory as a trial that fitted. In all other cases the model decides; without a
        model or a batch size, the probability is 1.
        """
        return float(self.chances([params])[0])

    def chances(self, configurations: Sequence[Mapping[str, Any]]) -> Array:
        """Returns `chance` of many configurations. Configurations with equal memory knobs are computed once."""
        keys = [self._key(params) for params in configurations]
        new = {key: params for key, params in zip(keys, configurations, strict=True) if key not in self._chances}
        if new:
            self._chances.update(zip(new, self._computed(list(new.values())), strict=True))
        return np.array([self._chances[key] for key in keys])

    def _key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            *(params.get(key) for key in (*CLASS_KNOBS, *ALLOCATING_KNOBS, *FIXED_KNOBS, BATCH)),
            *((params.get(WORKERS) == 0, params.get(THREADS)) if self._is_cpu else ()),
            *(params.get(key) for key in HOST_KNOBS if self._host_out),
        )

    def fits(self, params: Mapping[str, Any]) -> bool:
        """Whether the chance that a configuration fits is high enough for an initial configuration (SAFE_CHANCE)."""
        return self.fitting([params])[0]

    def fitting(self, configurations: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Returns `fits` of many configurations."""
        return [chance >= SAFE_CHANCE for chance in self.chances(configurations).tolist()]

    def fills(self, params: Mapping[str, Any], larger: Sequence[int]) -> int | None:
        """Returns the largest batch size in `larger` that safely fits; None if no size fits, or if all fit.

        If all fit, the result is None because even the largest size may leave memory unused.
        """
        safe = [batch for batch in larger if self._is_safe({**params, BATCH: batch})]
        return max(safe) if safe and len(safe) < len(larger) else None

    def _is_safe(self, params: Mapping[str, Any]) -> bool:
        return self._is_known and BATCH in params and self.fits(params) and self._below([params], SAFE_FRAC)[0] >= 1 / 2

    def is_known_out(self, params: Mapping[str, Any]) -> bool:
        """Whether a trial of the same class ran out of memory with at most this batch and, on a CPU, at most these threads.

        On a GPU, also whether a trial with at most this batch, these workers and this prefetching ran out of host memory.
        """
        if any(_needs_as_much_of_host(params, out) for out in self._host_out):
            return True
        threads = params.get(THREADS, 0)
        known = self._out_of.get(tuple(self._out_class_of(params)), ())
        return any(params.get(BATCH, 0) >= batch and (not self._is_cpu or threads >= own) for batch, own in known)

    def _computed(self, configurations: Sequence[Mapping[str, Any]]) -> list[float]:
        below = self._below(configurations, FITS_FRAC) if self._is_known else np.ones(len(configurations))
        return [
            0.0 if self.is_known_out(params) else 1.0 if BATCH not in params or self._is_known_in(params) else float(chance)
            for params, chance in zip(configurations, below, strict=True)
        ]

    def _is_known_in(self, params: Mapping[str, Any]) -> bool:
        """Whether a trial of the same class fitted with at least this batch and, on a CPU, at least these threads."""
        batch, threads = params.get(BATCH, 0), params.get(THREADS, 0) if self._is_cpu else 0
        known = self._in_of.get(tuple(self._class_of(params)), ())
        return any(own >= batch and (not self._is_cpu or of_own >= threads) for own, of_own in known)

    @staticmethod
    def _by(
        class_of: Callable[[Mapping[str, Any]], list[tuple[str, str]]], peaks: Sequence[Peak]
    ) -> dict[tuple[tuple[str, str], ...], set[tuple[float, float]]]:
        """Returns a dict from each class to the set of (batch size, number of threads) of its trials."""
        found: dict[tuple[tuple[str, str], ...], set[tuple[float, float]]] = {}
        for peak in peaks:
            entry = (peak.params.get(BATCH, 0), peak.params.get(THREADS, 0))
            found.setdefault(tuple(class_of(peak.params)), set()).add(entry)
        return found

    def _below(self, configurations: Sequence[Mapping[str, Any]], frac: float) -> Array:
        """Returns the probability that each configuration needs at most a share `frac` of the memory."""
        means, variances = self._shares([params if BATCH in params else {**params, BATCH: 0} for params in configurations])
        return np.asarray(self._belief @ ndtr((frac - means) / np.sqrt(variances)))

    def _class_of(self, params: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Returns the class of a configuration: its values that change the bytes of a sample or of the model."""
        values = _values(params, CLASS_KNOBS)
        if self._is_cpu and WORKERS in params:
            values.append((IN_PROCESS, repr(params[WORKERS] == 0)))
        return values

    def _out_class_of(self, params: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [*self._class_of(params), *_values(params, ALLOCATING_KNOBS)]

    def _marks(self, configurations: Sequence[Mapping[str, Any]]) -> tuple[Array, Array, Array]:
        """Returns which class values and which other values each configuration has, and its batch size in units of `_unit`."""
        own = [set(self._class_of(params)) for params in configurations]
        others = [set(_values(params, self._fixed_knobs)) for params in configurations]
        marks = np.array([[value in one for value in self._values] for one in own], dtype=float).reshape(len(own), -1)
        fixed = np.array([[value in one for value in self._fixed] for one in others], dtype=float).reshape(len(own), -1)
        return marks, fixed, np.array([float(params[BATCH]) for params in configurations]) / self._unit

    def _predicted(self, weights: Array, marks: Array, fixed: Array, batches: Array) -> tuple[Array, Array]:
        """Returns the expected shares [m, configuration] and their derivatives [m, configuration, weight], for each value of m.

        The weights are: the part that does not grow with the batch; what each class value adds to this part; what each other
        value adds to it; and the logarithm of the factor by which each class value multiplies the growing part.
        """
        num = marks.shape[1]
        level, added, others, factors = np.split(weights, [1, 1 + num, 1 + num + fixed.shape[1]], axis=1)
        growing = self._growing[:, None] * batches * np.exp(np.clip(factors @ marks.T, -4.0, 4.0))
        shares = level + added @ marks.T + others @ fixed.T + growing
        ones = np.broadcast_to(
            np.hstack([np.ones((len(batches), 1)), marks, fixed]), (len(weights), len(batches), 1 + num + fixed.shape[1])
        )
        return shares, np.concatenate([ones, growing[:, :, None] * marks], axis=2)

    def _shares(self, configurations: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """Returns mean and variance of the memory shares that configurations need, [m, configuration], for each value of m."""
        marks, fixed, batches = self._marks(configurations)
        means, slopes = self._predicted(self._weights, marks, fixed, batches)
        variances = np.einsum("sci,sij,scj->sc", slopes, self._covariances, slopes, optimize=True)
        unseen = np.array([sum(value not in self._values for value in self._class_of(params)) for params in configurations])
        growing = self._growing[:, None] * batches
        variances = variances + unseen * ((CLASS_SPREAD * growing) ** 2 + self._class_fixed**2) + NOISE_FRAC**2
        return means, variances

    def _fit(self, shares: Array, capacity_bytes: float) -> None:
        """Fits the other weights for each value of m, and computes the probability of each value."""
        level = float(np.max(shares))
        process = min(self._process_frac, MOST_PROCESS_FRAC * float(np.min(shares)))
        of_trial = level - process
        self._class_fixed = CLASS_FIXED_SPREAD * of_trial
        self._growing = GROWING * level
        num, num_fixed = len(self._values), len(self._fixed)
        spared = np.log1p([-SPARED.get(value, 0.0) for value in self._values])
        expected = np.concatenate([[process + FIXED_FRAC * of_trial], np.zeros(num + num_fixed), spared])
        fixed_spread = FIXED_SPREAD * of_trial + PROCESS_SPREAD * process
        of_threads = max(self._class_fixed, THREADS_BYTES / capacity_bytes)
        of_fixed = [of_threads if key == THREADS else self._class_fixed for key, _ in self._fixed]
        spreads = np.concatenate([[fixed_spread], np.full(num, self._class_fixed), of_fixed, np.full(num, CLASS_SPREAD)])
        out = [peak for peak in self._out if BATCH in peak.params]
        marks, fixed, batches = self._marks([peak.params for peak in (*self._in, *out)])
        is_out = np.array([False] * len(self._in) + [True] * len(out))
        least = np.concatenate([shares, np.ones(len(out))])  # a trial that ran out of memory needs at least all of it
        precision = np.diag(spreads**-2.0)
        weights = np.broadcast_to(expected, (len(self._growing), len(expected))).copy()
        for _ in range(NUM_STEPS):
            found, slopes = self._predicted(weights, marks, fixed, batches)
            errors = np.where(is_out, np.maximum(least - found, 0.0), least - found)
            slopes = slopes * (~is_out | (errors > 0))[:, :, None]
            self._covariances = np.linalg.inv(slopes.transpose(0, 2, 1) @ slopes / NOISE_FRAC**2 + precision)
            pulls = np.einsum("sti,st->si", slopes, errors) / NOISE_FRAC**2 + (expected - weights) / spreads**2
            step = np.einsum("sij,sj->si", self._covariances, pulls)
            step[:, 1 + num + num_fixed :] = np.clip(step[:, 1 + num + num_fixed :], -MAX_FACTOR, MAX_FACTOR)
            weights += step
        found = self._predicted(weights, marks, fixed, batches)[0]
        self._weights = weights
        errors = np.where(is_out, np.maximum(least - found, 0.0), least - found)
        misfits = ((errors / NOISE_FRAC) ** 2).sum(axis=1) + (((weights - expected) / spreads) ** 2).sum(axis=1)
        likelihoods = -0.5 * misfits + 0.5 * np.linalg.slogdet(self._covariances)[1]
        belief = np.exp(likelihoods - likelihoods.max())
        self._belief = belief / belief.sum()


def _distinct(peaks: Sequence[Peak]) -> list[Peak]:
    """Returns the latest peak of each combination of memory knobs; of these, the MOST_PEAKS with the largest batches."""
    latest = {peak.kind: peak for peak in peaks}.values()
    return sorted(latest, key=lambda peak: -float(peak.params.get(BATCH, 0)))[:MOST_PEAKS]


def _needs_as_much_of_host(params: Mapping[str, Any], out: Mapping[str, Any]) -> bool:
    """Whether a configuration needs at least as much host memory as one that ran out of it; False if that is not known."""
    keys = [key for key in HOST_KNOBS if key in out]
    return bool(keys) and all(params.get(key, 0) >= out[key] for key in keys)


def _values(params: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[str, str]]:
    return [(key, repr(params[key])) for key in keys if key in params]
