"""Estimates what each change of a configuration contributes, from all trials of a study.

A search is not a designed experiment: knobs change together, and effects interact. But many trials are close to the
configuration whose changes are of interest. So the log rate is modelled with that configuration as the origin. There is one
coefficient for every knob that a trial sets to another value, and one for every pair of such knobs. The sizes of effects,
interactions and noise are unknown. So the model is averaged over a grid of scales, each weighted by how well it explains the
trials (Bayesian model averaging, Hoeting et al. 1999). Effects that the trials do not determine are not estimated.
tests/compare/test_effects.py simulates how often the intervals contain the truth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotune import stats
from autotune.compare.noise import UNKNOWN_NOISE
from autotune.records import AGAIN, Kind, Knobs, TrialRecord
from autotune.stats import Noise
from autotune.trials.configurations import SEARCHED, ConfigurationKey, configuration_key

EFFECT_SCALES = (0.03, 0.1, 0.3, 1.0)  # standard deviation of the effect of one knob, on the log scale
INTERACTION_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)  # standard deviation of the interaction of two knobs, on the log scale
# Standard deviation of one measurement, on the log scale; the prior weight of each value follows from `noise` (`_log_prior`).
# The large values are for machines whose speed changes while a study runs, as when another program ends: rates of the search
# may then differ by a factor of three.
NOISE_SCALES = (0.004, 0.01, 0.025, 0.06, 0.15, 0.4, 1.0)
LEVEL_SCALE = 3.0  # standard deviation of the log rate's level: so wide that it assumes nothing about the level
MAX_VARIANCE_FRAC = 0.5  # an effect is reported if the trials reduce its variance to at most this share of the prior variance
QUANTILE = 2.3  # half-width of a 95 % interval in standard deviations: 1.96, widened because the winner was picked by its rates
MAX_NEAR_CHANGES = 5  # an effect is reported only if trials at most this many changes away from the origin determine it
MAX_CONFIGURATIONS = 60  # only the nearest configurations are used; others add almost nothing

Feature = tuple[str, Any]


def estimated(
    changed: Knobs,
    lost: Mapping[str, Sequence[str]],
    records: Sequence[TrialRecord],
    noise: Noise | None = None,
    *,
    is_any: bool = False,
    before: Knobs | None = None,
) -> dict[str, stats.Ratio]:
    """Returns {knob: ratio of a configuration's rate to its rate without the knob's change}.

    Knobs whose ratio the trials do not determine are left out.

    Args:
        changed: the configuration's changes against the baseline.
        lost: knob -> changes that depend on it and are reverted with it.
        records: all trials of the study.
        noise: spread of one measurement, from rounds measured side by side; if None, UNKNOWN_NOISE is used.
        is_any: whether to return every effect that the trials can distinguish from other effects, however wide its interval.
        before: changes of the configuration from which reverted knobs take their values; None for the baseline. With `before`,
            only the knobs in `lost` are considered.
    """
    able = [one for one in records if one.score and one.outcome.may_win and one.kind not in (Kind.parity, Kind.check)]
    logs: dict[ConfigurationKey, list[float]] = {}
    for one in undoubted(able):
        logs.setdefault(configuration_key(one.changed), []).append(math.log(one.score or 1.0))
    rows = [(_features(dict(key), changed), found) for key, found in logs.items()]
    rows = sorted(rows, key=lambda row: len(row[0]))[:MAX_CONFIGURATIONS]
    names = list(dict.fromkeys(feature for features, _ in rows for feature in features))
    reverted = changed if before is None else lost
    wanted = {knob: [(key, (before or {}).get(key)) for key in (knob, *lost.get(knob, ()))] for knob in reverted}
    known = {knob: features for knob, features in wanted.items() if all(feature in names for feature in features)}
    if len(rows) < 2 or not known:
        return {}
    design = np.array([[float(name in features) for name in names] for features, _ in rows])
    contrasts = np.array([[-float(name in features) for name in names] for features in known.values()])
    counts, centres = (np.array([of(logs) for _, logs in rows]) for of in (len, np.mean))
    means, variances, priors = _averaged(design, centres, counts, contrasts, noise)
    found = {}
    for knob, contrast, mean, variance, prior in zip(known, contrasts, means, variances, priors, strict=True):
        if (is_any or variance <= MAX_VARIANCE_FRAC * prior) and _is_determined(design, contrast):
            ratio, half = math.exp(mean), QUANTILE * math.sqrt(variance)
            found[knob] = stats.Ratio(ratio=ratio, ci=(ratio * math.exp(-half), ratio * math.exp(half)), num_rounds=0)
    return found


def undoubted(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the trials except those of the search whose rate was in doubt and whose configuration was measured again."""
    able = [one for one in records if one.origin == AGAIN and one.score and one.outcome.may_win]
    again = {configuration_key(one.changed): one.number for one in able}
    if not again:
        return list(records)
    return [one for one in records if one.kind not in SEARCHED or one.number >= again.get(configuration_key(one.changed), 0)]


def estimated_together(
    knobs: Sequence[str], changed: Knobs, records: Sequence[TrialRecord], noise: Noise | None = None
) -> stats.Ratio | None:
    """Returns the ratio of a configuration's rate to its rate without several changes; None if the trials do not determine it.

    The changes are those of `knobs`. All other arguments are those of `estimated`.
    """
    first, *others = knobs
    return estimated(changed, {first: others}, records, noise, is_any=True).get(first)


def _is_determined(design: np.ndarray[Any, Any], contrast: np.ndarray[Any, Any]) -> bool:
    """Whether a contrast (a weighted sum of coefficients) is a weighted sum of differences between trials near the origin.

    Then only noise and interactions disturb it. Trials far from the origin do not count, since they have many interactions. In
    a simulated study, a far slower baseline would otherwise have given a gain of 2.5x to a change without an effect.
    """
    own = contrast != 0  # changes that are reverted together count as one
    num_changes = design.sum(axis=1) - np.where((design[:, own] != 0).all(axis=1), own.sum() - 1, 0)
    near = design[num_changes <= MAX_NEAR_CHANGES]
    if not near.size:  # the origin may have no usable rate, for example if its trial was stopped early
        return False
    differences = near - near.mean(axis=0)
    rank = np.linalg.matrix_rank(differences)
    return bool(np.linalg.matrix_rank(np.vstack([differences, contrast])) == rank)


def _features(other: Knobs, origin: Knobs) -> list[Feature]:
    """Returns how a configuration differs from the origin: (knob, value) pairs, None for the baseline's value."""
    return [(key, other.get(key)) for key in {**origin, **other} if other.get(key) != origin.get(key)]


def _averaged(
    design: np.ndarray[Any, Any],
    logs: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any],
    contrasts: np.ndarray[Any, Any],
    noise: Noise | None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns mean, variance and prior variance of each contrast (a weighted sum of coefficients), over the grid of scales."""
    # The first axis of the arrays below is the point of the grid. A loop over these points took five times as long.
    grid = np.array(list(itertools.product(EFFECT_SCALES, INTERACTION_SCALES, NOISE_SCALES)))
    effect, interaction, spread = (grid**2).T[:, :, None, None]
    shared_changes = design @ design.T  # number of changes that two trials share; each pair of these is a shared interaction
    shared_pairs = shared_changes * (shared_changes - 1) / 2
    covariances = effect * shared_changes + interaction * shared_pairs + LEVEL_SCALE**2 + spread * np.diag(1 / counts)
    # If several changes are reverted together, such as workers and knobs that depend on them, their interactions disappear,
    # too. So these interactions belong to the effect.
    together, sizes = -contrasts @ design.T, (contrasts**2).sum(axis=1)
    shared = -(effect * together + interaction * together * (together - 1) / 2)
    priors = (effect * sizes + interaction * sizes * (sizes - 1) / 2)[:, 0]
    centred = logs - logs.mean()
    solved = np.linalg.solve(covariances, np.concatenate([shared, np.tile(centred, (len(grid), 1, 1))], axis=1).swapaxes(1, 2))
    weights = -0.5 * (solved[..., -1] @ centred + np.linalg.slogdet(covariances).logabsdet)
    weights += [_log_prior(float(point[2]), noise) for point in grid]
    share = np.exp(weights - weights.max())
    share /= share.sum()
    means = np.einsum("gij,gj->gi", shared, solved[..., -1])
    variances = priors - np.einsum("gij,gji->gi", shared, solved[..., :-1])
    mean = share @ means
    return mean, share @ (variances + (means - mean) ** 2), share @ priors


def _log_prior(spread: float, noise: Noise | None) -> float:
    """Returns the log density of a spread: scaled inverse chi-squared."""
    noise = noise or UNKNOWN_NOISE
    return -noise.freedom * (math.log(spread) + 0.5 * (noise.spread / spread) ** 2)
