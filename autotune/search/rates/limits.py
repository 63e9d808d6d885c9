"""Forecasts whether configurations keep within the study's limits on step time and power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import ndtr

from autotune.search.rates.average import AveragedForecast
from autotune.search.rates.coding import BATCH, Array, Codes, Coding
from autotune.search.rates.history import Seen
from autotune.search.rates.model import LinearModel

STEP_TIME = "step_p95_s"  # proportional to (samples of an optimizer step) / rate; other metrics are learned without a rule
ACCUMULATION = "step.accumulation"


def chances(
    limits: Mapping[str, float],
    measured: Sequence[Seen],
    forecast: AveragedForecast,
    coding: Coding,
    codes: Codes,
    *,
    is_held: bool = False,
) -> Array:
    """Returns the probability that each configuration keeps within all limits.

    Args:
        limits: {metric: largest allowed value}.
        measured: trials with a rate.
        forecast: forecasts the rates.
        coding: the levels of the knobs.
        codes: the configurations.
        is_held: whether a step has the same number of samples in every configuration.
    """

    def samples(some: Codes) -> Array:
        """Returns the number of samples of a step, up to a factor."""
        if is_held:
            return np.ones(len(some))
        return coding.numbers(BATCH, some, otherwise=1.0) * coding.numbers(ACCUMULATION, some, otherwise=1.0)

    found = np.ones(len(codes))
    for metric, most in limits.items():
        known = [(one, one.metrics[metric]) for one in measured if one.metrics and metric in one.metrics]
        if not known:
            continue
        tried = coding.encode([one.params for one, _ in known])
        values = np.log([value for _, value in known])
        allowed = np.full(len(codes), np.log(most))
        if metric == STEP_TIME:
            values += np.log([one.rate or 1.0 for one, _ in known]) - np.log(samples(tried))
            allowed += forecast.means(codes).mean - np.log(samples(codes))
        features = forecast.features(codes)
        model = LinearModel(forecast.features(tried), values)
        variances, _, _ = model.variances(features, features[[0]])
        found *= ndtr((allowed - model.mean(features)) / np.sqrt(variances + model.scales[2] ** 2))
    return found
