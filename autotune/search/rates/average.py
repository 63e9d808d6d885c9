"""Averages forecasts over a quantity that is unknown if step and loader share cores.

The quantity is how much a whole step is delayed when a loader worker takes a core from one of the step's threads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotune.search.rates.coding import Array, Codes, Coding, Features
from autotune.search.rates.forecast import MIN_DEVICE_RATES, Expected, Forecast, Means
from autotune.search.rates.history import Seen
from autotune.search.rates.model import Scales
from autotune.search.rates.regime import Machine
from autotune.search.rates.views import ALL, Views

WAITING = (1.0, 0.5, 0.0)  # values of `waiting` in `regime.combined`, equally probable before the trials


class AveragedForecast:
    """Averages the forecasts for all values of WAITING, weighted by how well each value explains the rates.

    On shared cores, the device rate D cannot be observed. It is derived from a trial's rate, the loader's capacity L and an
    assumed value of `waiting`. A wrong value gives a wrong D, but this D still explains the trial's rate. So no single trial
    shows which value is right. If the step computes on a GPU, there is only one forecast.

    Attributes:
        is_decomposed: see `Forecast`.
        spread: `Forecast.spread` of the most probable forecast.
        scales: spreads that each model uses, by value of `waiting` and model.

    Args:
        coding: the levels of the knobs.
        trials: past trials, at least one of them with a rate.
        machine: cores, and whether the step computes on them.
        may_decompose: whether to learn D and L separately.
        scales: spreads from an earlier forecast; {} to find the most likely ones.
        gains, spreads: see `Views`.
        min_device_rates: D and L are learned separately if at least this many trials have a D.
    """

    def __init__(
        self,
        coding: Coding,
        trials: Sequence[Seen],
        machine: Machine,
        *,
        may_decompose: bool = True,
        scales: Mapping[float, Mapping[str, Scales]] | None = None,
        gains: Mapping[str, Mapping[Any, float]] | None = None,
        spreads: Mapping[str, float] | None = None,
        min_device_rates: int = MIN_DEVICE_RATES,
    ) -> None:
        is_open = may_decompose and machine.is_cpu and machine.num_cores is not None
        self._views, measured = Views(coding, machine, gains, spreads), [trial for trial in trials if trial.rate is not None]
        codes = coding.encode([trial.params for trial in measured])
        found: dict[float, Forecast] = {}
        for waiting in WAITING if is_open else WAITING[:1]:
            found[waiting] = Forecast(
                self._views,
                measured,
                codes,
                waiting=waiting,
                may_decompose=may_decompose,
                scales=(scales or {}).get(waiting),
                min_device_rates=min_device_rates,
                like=found.get(WAITING[0]),
            )
        first = found[WAITING[0]]
        self.is_decomposed = first.is_decomposed
        self._forecasts = [one for one in found.values() if one.is_decomposed] if self.is_decomposed else [first]
        self.scales = {waiting: one.scales for waiting, one in found.items()}
        evidence = np.array([one.evidence for one in self._forecasts])
        self._weights = np.exp(evidence - evidence.max()) / np.exp(evidence - evidence.max()).sum()
        self.spread = self._forecasts[int(np.argmax(evidence))].spread

    def features(self, codes: Codes) -> Features:
        """Returns the features of configurations for a model of another quantity."""
        return self._views.features(ALL, codes)

    def means(self, codes: Codes) -> Means:
        """Returns the forecasts for configurations without their uncertainty, which takes much longer to compute."""
        if len(self._forecasts) == 1:
            return self._forecasts[0].means(codes)
        parts = [one.means(codes) for one in self._forecasts]
        return Means(
            mean=self._weights @ np.array([one.mean for one in parts]),
            device=self._weights @ np.array([one.device for one in parts]),
            loader=self._weights @ np.array([one.loader for one in parts]),
        )

    def expected(self, codes: Codes, reference: Codes) -> Expected:
        """Returns the forecasts for configurations; `reference` is the single row to which `Expected.spread` refers."""
        if len(self._forecasts) == 1:
            return self._forecasts[0].expected(codes, reference)
        both = np.vstack([codes, reference])
        parts = [one.expected(both, reference) for one in self._forecasts]
        means = np.array([one.mean for one in parts])
        mean, ratios = self._weights @ means, means - means[:, -1:]
        within, between = np.array([one.spread for one in parts]) ** 2, (ratios - self._weights @ ratios) ** 2
        own, own_between = np.array([one.own_spread for one in parts]) ** 2, (means - mean) ** 2
        return Expected(
            mean=mean[:-1],
            spread=np.sqrt(self._weights @ (within + between))[:-1],
            own_spread=np.sqrt(self._weights @ (own + own_between))[:-1],
            device=(self._weights @ np.array([one.device for one in parts]))[:-1],
            loader=(self._weights @ np.array([one.loader for one in parts]))[:-1],
        )

    def draws(self, codes: Codes, *, num: int, rng: np.random.Generator) -> Array:
        """Returns joint posterior samples of the rates, [configuration, draw]; for at most a few hundred configurations."""
        counts = rng.multinomial(num, self._weights)
        return np.hstack(
            [one.draws(codes, num=int(count), rng=rng) for one, count in zip(self._forecasts, counts, strict=True) if count]
        )

    def conditioned(self, codes: Codes) -> AveragedForecast:
        """Returns the forecast as it would be after trials of these configurations, if they ended as expected.

        The expected rates stay the same, and their spreads fall.
        """
        found = copy.copy(self)
        first, *others = self._forecasts
        first = first.conditioned(codes)
        found._forecasts = [first, *(one.conditioned(codes, like=first) for one in others)]
        return found

    def supposed(self, configurations: Sequence[Mapping[str, Any]], codes: Codes) -> list[Seen]:
        """Returns an imagined trial for each configuration, with the rates that are expected. `codes` holds them encoded.

        If the step and the loader share cores, the trial has no D.
        """
        expected = self.means(codes)
        is_shared = self._views.are_shared(codes).tolist()
        rows = zip(configurations, is_shared, *np.exp([expected.mean, expected.device, expected.loader]).tolist(), strict=True)
        return [
            Seen(
                params=params,
                rate=rate,
                device_rate=None if shares else device,
                loader_rate=loader if np.isfinite(loader) else None,
                is_shared=shares,
                may_win=True,
            )
            for params, shares, rate, device, loader in rows
        ]
