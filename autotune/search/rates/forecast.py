"""Forecasts rates of configurations: learns device rate D and loader capacity L, combines them, and learns the residual."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.search.rates.coding import Array, Codes
from autotune.search.rates.history import Seen
from autotune.search.rates.model import LinearModel, Scales
from autotune.search.rates.regime import combined, device_rate
from autotune.search.rates.views import ALL, DEVICE, LOADER, REST, REST_USUAL, Views

REST_LEVEL = 0.05  # prior spread of the residual's level, in logarithms
ROUGH = 2.0  # noise of a trial that was stopped early or unsteady, relative to an ordinary one
LOADER_NOISE = 1.5  # noise of L relative to that of a rate, since L is measured over fewer batches
READ_OFF_NOISE = 8.0  # noise of a D derived from a rate on shared cores, relative to a measured D: the interference is unknown
UNSURE = 8.0  # a derived D is discarded if its relative uncertainty is at least this many times the rate's
SLOPE_STEP = 0.02  # step of the numerical derivative, in logarithms
# D and L are learned separately if at least two trials have a D. While trials are running, one is enough: then the forecast may
# have to be made from the baseline alone, and only D and L show what loader workers or a larger batch can gain.
MIN_DEVICE_RATES, MIN_DEVICE_RATES_RUNNING = 2, 1


@dataclass(frozen=True, kw_only=True)
class Means:
    """Forecasts for configurations, in logarithms of samples per second.

    Attributes:
        mean: expected rate.
        device, loader: expected D and L; L is infinite if unknown.
    """

    mean: Array
    device: Array
    loader: Array


@dataclass(frozen=True, kw_only=True)
class Expected(Means):
    """Forecasts with their uncertainty.

    Attributes:
        spread: standard deviation of the difference between this rate and that of a reference configuration.
        own_spread: standard deviation of the rate itself.
    """

    spread: Array
    own_spread: Array


class Forecast:
    """Learns from trials and forecasts the rates of configurations.

    Attributes:
        is_decomposed: whether D and L are learned separately, which requires enough measurements of both; otherwise only the
            rate is learned.
        spread: root mean square of the rates' leave-one-out errors, in logarithms.
        scales: spreads that each model uses, by the model's name.
        evidence: logarithm of the probability density of the rates, given the forecasts of D and L, up to a constant.

    Args:
        views: what the models see of configurations.
        measured: past trials with a rate, at least one.
        codes: their configurations.
        waiting: how much a loader worker that takes a core delays the step's threads, from 0 to 1, see `regime.combined`.
        may_decompose: whether to learn D and L separately.
        scales: spreads from an earlier forecast; {} to find the most likely ones.
        min_device_rates: D and L are learned separately if at least this many trials have a D.
        like: a forecast with another `waiting`, from the same trials and with the same scales. Its model of L is reused, since
            `waiting` does not affect L. None if there is none.
    """

    def __init__(
        self,
        views: Views,
        measured: Sequence[Seen],
        codes: Codes,
        *,
        waiting: float = 1.0,
        may_decompose: bool = True,
        scales: Mapping[str, Scales] | None = None,
        min_device_rates: int = MIN_DEVICE_RATES,
        like: Forecast | None = None,
    ) -> None:
        self._views, self._waiting, known = views, waiting, scales or {}
        rates = np.array([trial.rate for trial in measured], dtype=float)
        rough = np.array([ROUGH if trial.is_rough else 1.0 for trial in measured])
        loader = np.array([np.nan if trial.loader_rate is None else trial.loader_rate for trial in measured])
        device, noise = self._device_rates(measured, codes, rates, loader)
        has_device, has_loader = np.isfinite(device), np.isfinite(loader)
        self.is_decomposed = may_decompose and int(has_device.sum()) >= min_device_rates and bool(has_loader.any())
        self._loader: LinearModel | None = None
        self._rest: LinearModel | None = None
        if not self.is_decomposed:
            beside_usual = np.log(rates) - self._views.usual_device(codes)
            self._device = LinearModel(self._views.features(ALL, codes), beside_usual, noise=rough, scales=known.get(ALL))
            self.spread = _rms(self._device.left_out_errors())
            self.scales, self.evidence = {ALL: self._device.scales}, self._device.evidence
            return
        with_device = codes if has_device.all() else codes[has_device]
        self._device = LinearModel(
            self._views.features(DEVICE, with_device),
            np.log(device[has_device]) - self._views.usual_device(with_device),
            noise=(rough * noise)[has_device],
            scales=known.get(DEVICE),
        )
        with_loader = codes if has_loader.all() else codes[has_loader]
        self._loader = (like._loader if like else None) or LinearModel(
            self._views.features(LOADER, with_loader),
            np.log(loader[has_loader]) - self._views.usual_loader(with_loader),
            noise=LOADER_NOISE * rough[has_loader],
            scales=known.get(LOADER),
        )
        left = np.log(rates) - self._together(codes, *self._sides(codes))
        self._rest = LinearModel(
            self._views.features(REST, codes),
            left,
            noise=rough,
            usual=REST_USUAL,
            level_spread=REST_LEVEL,
            prior_level=0.0,
            scales=known.get(REST),
        )
        self.spread = _rms(self._rest.left_out_errors())
        self.evidence = self._rest.evidence
        self.scales = {DEVICE: self._device.scales, LOADER: self._loader.scales, REST: self._rest.scales}

    def means(self, codes: Codes) -> Means:
        """Returns the forecasts for configurations without their uncertainty, which takes much longer to compute."""
        device, loader = self._sides(codes)
        if self._rest is None:
            return Means(mean=device, device=device, loader=loader)
        mean = self._together(codes, device, loader) + self._rest.mean(self._views.features(REST, codes))
        return Means(mean=mean, device=device, loader=loader)

    def expected(self, codes: Codes, reference: Codes) -> Expected:
        """Returns the forecasts for configurations; `reference` is the single row to which `Expected.spread` refers.

        Spreads are propagated to first order: the spreads of D and L are multiplied by the rate's slopes with respect to them.
        """
        of_reference = self._sides(reference)  # computed first, so that the features cached last are those of `codes`
        device, loader = self._sides(codes)
        if self._loader is None or self._rest is None:
            parts = [(self._device, ALL, np.ones(len(codes)), 1.0)]
            mean = device
        else:
            rates, of_device, of_loader = self._slopes(codes, device, loader)
            mean = rates + self._rest.mean(self._views.features(REST, codes))
            _, *slopes = self._slopes(reference, *of_reference)
            parts = [
                (self._device, DEVICE, of_device, float(slopes[0][0])),
                (self._loader, LOADER, of_loader, float(slopes[1][0])),
                (self._rest, REST, np.ones(len(codes)), 1.0),
            ]
        variance, own_variance = np.zeros(len(codes)), np.zeros(len(codes))
        for model, side, slope, other in parts:
            own, shared, of_other = model.variances(self._views.features(side, codes), self._views.features(side, reference))
            variance += slope**2 * own + other**2 * of_other - 2 * slope * other * shared
            own_variance += slope**2 * own
        spread = np.sqrt(np.maximum(variance, 0.0))
        return Expected(mean=mean, spread=spread, own_spread=np.sqrt(own_variance), device=device, loader=loader)

    def draws(self, codes: Codes, *, num: int, rng: np.random.Generator) -> Array:
        """Returns joint posterior samples of the rates, [configuration, draw]; for at most a few hundred configurations."""
        views, usual = self._views, self._views.usual_device(codes)[:, None]
        if self._loader is None or self._rest is None:
            return self._device.draws(views.features(ALL, codes), num=num, rng=rng) + usual
        devices = self._device.draws(views.features(DEVICE, codes), num=num, rng=rng) + usual
        loaders = self._loader.draws(views.features(LOADER, codes), num=num, rng=rng) + views.usual_loader(codes)[:, None]
        return self._together(codes, devices, loaders) + self._rest.draws(views.features(REST, codes), num=num, rng=rng)

    def conditioned(self, codes: Codes, like: Forecast | None = None) -> Forecast:
        """Returns the forecast as it would be after trials of some configurations, if they ended as expected.

        The expected rates stay the same, and their spreads fall.

        Args:
            codes: the configurations.
            like: the result for a forecast with another `waiting`, whose model of L is reused; None if there is none.
        """
        found, ordinary = copy.copy(self), np.ones(len(codes))
        if self._loader is None or self._rest is None:
            found._device = self._device.conditioned(self._views.features(ALL, codes), ordinary)
            return found
        means, features = self.means(codes), self._views.features(DEVICE, codes)
        _, noise = self._derived(codes, np.exp(means.mean), np.exp(means.loader), self._views.are_shared(codes))
        is_known = np.isfinite(noise)
        found._device = self._device.conditioned(features if is_known.all() else features[is_known], noise[is_known])
        loader_noise = LOADER_NOISE * ordinary
        found._loader = like._loader if like else self._loader.conditioned(self._views.features(LOADER, codes), loader_noise)
        found._rest = self._rest.conditioned(self._views.features(REST, codes), ordinary)
        return found

    def _sides(self, codes: Codes) -> tuple[Array, Array]:
        """Returns the expected logarithms of D and L; if not decomposed, the logarithm of the rate, and infinity."""
        of_device = DEVICE if self.is_decomposed else ALL
        device = self._device.mean(self._views.features(of_device, codes)) + self._views.usual_device(codes)
        if self._loader is None:
            return device, np.full(len(codes), np.inf)
        return device, self._loader.mean(self._views.features(LOADER, codes)) + self._views.usual_loader(codes)

    def _slopes(self, codes: Codes, device: Array, loader: Array) -> tuple[Array, Array, Array]:
        """Returns the log rates, and their derivatives with respect to log D and log L."""
        now = self._together(codes, device, loader)
        of_device = (self._together(codes, device + SLOPE_STEP, loader) - now) / SLOPE_STEP
        return now, of_device, (self._together(codes, device, loader + SLOPE_STEP) - now) / SLOPE_STEP

    def _together(self, codes: Codes, device: Array, loader: Array) -> Array:
        """Returns the log rates that result from log D and log L, with a row per configuration."""
        workers, threads = (values.reshape(-1, *[1] * (device.ndim - 1)) for values in self._views.processes(codes))
        rates = combined(
            *(np.exp(device), np.exp(loader)),
            workers=workers,
            threads=threads,
            machine=self._views.machine,
            waiting=self._waiting,
        )
        return np.asarray(np.log(rates))

    def _device_rates(self, measured: Sequence[Seen], codes: Codes, rates: Array, loader: Array) -> tuple[Array, Array]:
        """Returns each trial's D and its noise. If cores were shared, D is derived from the rate. An unknown D is NaN."""
        device = np.array([np.nan if trial.device_rate is None else trial.device_rate for trial in measured])
        is_hidden = np.array([trial.is_shared for trial in measured], dtype=bool) & ~np.isfinite(device) & np.isfinite(loader)
        derived, noise = self._derived(codes, rates, loader, is_hidden)
        return np.where(is_hidden, np.where(np.isfinite(noise), derived, np.nan), device), noise

    def _derived(self, codes: Codes, rates: Array, loader: Array, is_hidden: NDArray[np.bool_]) -> tuple[Array, Array]:
        """Returns the D derived from rate and L where `is_hidden`, NaN elsewhere, and its relative noise.

        The noise is infinite where a derived D is too uncertain to be used, and 1 where D is not hidden.
        """
        device, noise = np.full(len(codes), np.nan), np.ones(len(codes))
        if is_hidden.any():
            workers, threads = self._views.processes(codes[is_hidden])
            device[is_hidden], factor = device_rate(
                *(rates[is_hidden], loader[is_hidden]),
                workers=workers, threads=threads, machine=self._views.machine, waiting=self._waiting,
            )  # fmt: skip
            noise[is_hidden] = np.where(factor < UNSURE, READ_OFF_NOISE * np.maximum(factor, 1.0), np.inf)
        return device, noise


def _rms(errors: Array) -> float:
    return float(np.sqrt(np.mean(errors**2)))
