"""Forecasts whether configurations keep within the study's limits on step time and power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import ndtr

from autotune.search.rates.average import AveragedForecast
from autotune.search.rates.coding import BATCH, Array, Codes, Coding
from autotune.search.rates.history import Seen
from autotune.search.rates.model import LinearModel

STEP_TIME = "step_p95_s"  # proportional to batch size / rate; other metrics are learned without such a rule


def chances(
    limits: Mapping[str, float], measured: Sequence[Seen], forecast: AveragedForecast, coding: Coding, codes: Codes
) -> Array:
    """Returns the probability that each configuration keeps within all limits.

    Args:
        limits: {metric: largest allowed value}.
        measured: trials with a rate.
        forecast: forecasts the rates.
        coding: the levels of the knobs.
        codes: the configurations.
    """
    found = np.ones(len(codes))
    for metric, most in limits.items():
        known = [(one, one.metrics[metric]) for one in measured if one.metrics and metric in one.metrics]
        if not known:
            continue
        tried = coding.encode([one.params for one, _ in known])
        values = np.log([value for _, value in known])
        allowed = np.full(len(codes), np.log(most))
        if metric == STEP_TIME:
            values += np.log([one.rate or 1.0 for one, _ in known]) - np.log(coding.numbers(BATCH, tried, otherwise=1.0))
            allowed += forecast.means(codes).mean - np.log(coding.numbers(BATCH, codes, otherwise=1.0))
        features = forecast.features(codes)
        model = LinearModel(forecast.features(tried), values)
        variances, _, _ = model.variances(features, features[[0]])
        found *= ndtr((allowed - model.mean(features)) / np.sqrt(variances + model.scales[2] ** 2))
    return found
