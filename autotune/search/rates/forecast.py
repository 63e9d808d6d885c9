"""What rate a configuration will have: D and L learned apart and put together, and what is left over learned from the rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.search.rates.coding import BATCH, Array, Codes, Coding, Columns
from autotune.search.rates.history import Seen
from autotune.search.rates.model import LinearModel
from autotune.search.rates.regime import Machine, combined, device_rate, shared_frac

WORKERS, THREADS = "loader.num_workers", "threads.intra"
DEVICE, LOADER, ALL = "device", "loader", "all"
# How much a knob matters to one side, beside 1 for what belongs there. A knob without a side belongs to the device.
LOADER_PREFIX, ELSEWHERE = "loader.", 0.15
ON_BOTH = {BATCH: (1.0, 0.3), THREADS: (1.0, 0.5), "loader.pin_memory": (0.5, 0.5), "loader.own_cores": (0.5, 1.0)}
REST_USUAL = (0.08, 0.05, 0.03)  # what the two sides leave over: some, or the neighbours of the best are left out too soon
REST_LEVEL = 0.05
CROWDING_SPREAD = 0.3  # of what shared cores cost, round `regime.CROWDED`: 1 to 0.5 was seen
ROUGH = 2.0  # noise of a trial that was stopped early, beside an ordinary one's
LOADER_NOISE = 1.5  # L is read from fewer batches than the rate
READ_OFF_NOISE = 8.0  # D that is read from a rate on shared cores: how processes disturb each other is not known
UNSURE = 8.0  # a D that would be known so much worse than the rate it is read from says nothing
FAVOUR = 0.08
THREADS_TREND = 0.7  # D of a step on a CPU grows with its threads, to this power, up to the cores
BATCH_TREND, HALF_BATCH = 0.5, 32.0  # D grows with the batch, as a step's fixed costs are shared out: b/(b + half), to a power
MIN_DEVICE_RATES = 2


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is forecast of configurations, in logarithms of samples per second.

    Attributes:
        mean: rate that is expected of each.
        draws: rates that each may have: a configuration a row, a function drawn from what is known a column.
        device, loader: D and L that are expected; L is infinite where none is known.
    """

    mean: Array
    draws: Array
    device: Array
    loader: Array


class Forecast:
    """Learns from trials; forecasts the rates of configurations.

    Attributes:
        is_decomposed: whether D and L are learned apart, which takes that they are known; otherwise the rate by itself.
        spread: of the rates round what the other trials say of them, in logarithms.

    Args:
        coding: the levels of the knobs.
        trials: what was seen, at least one rate in it.
        machine: cores, and whether the step computes on them.
        may_decompose: whether to learn D and L apart.
        favoured: values that an expert would start with, by knob: they are expected to be a little better than others.
    """

    def __init__(
        self,
        coding: Coding,
        trials: Sequence[Seen],
        machine: Machine,
        *,
        may_decompose: bool = True,
        favoured: Mapping[str, Any] | None = None,
    ) -> None:
        self._coding, self._machine, self._favoured = coding, machine, favoured or {}
        scales = {side: coding.scaled({knob.key: scale(knob.key, side) for knob in coding.knobs}) for side in (DEVICE, LOADER)}
        measured = [trial for trial in trials if trial.rate is not None]
        codes = coding.encode([trial.params for trial in measured])
        columns = coding.columns(codes)
        rates = np.array([trial.rate for trial in measured], dtype=float)
        rough = np.array([ROUGH if trial.is_rough else 1.0 for trial in measured])
        loader = np.array([np.nan if trial.loader_rate is None else trial.loader_rate for trial in measured])
        device, noise = self._device_rates(measured, codes, rates, loader)
        has_device, has_loader = np.isfinite(device), np.isfinite(loader)
        self.is_decomposed = may_decompose and int(has_device.sum()) >= MIN_DEVICE_RATES and bool(has_loader.any())
        self._loader: LinearModel | None = None
        self._rest: LinearModel | None = None
        if not self.is_decomposed:
            self._device = LinearModel(columns, np.log(rates) - self._usual_device(codes), noise=rough)
            self.spread = _rms(self._device.left_out_errors())
            return
        self._device = LinearModel(
            columns[has_device],
            np.log(device[has_device]) - self._usual_device(codes[has_device]),
            scale=scales[DEVICE],
            noise=(rough * noise)[has_device],
        )
        beside_usual = np.log(loader[has_loader]) - self._usual_loader(codes[has_loader])
        self._loader = LinearModel(
            columns[has_loader], beside_usual, scale=scales[LOADER], noise=LOADER_NOISE * rough[has_loader]
        )
        left = np.log(rates) - self._together(codes, *self._sides(codes, columns))
        self._rest = LinearModel(
            self._rest_columns(columns, codes), left, noise=rough, usual=REST_USUAL, level_spread=REST_LEVEL, prior_level=0.0
        )
        self.spread = _rms(self._rest.left_out_errors())

    def expected(self, codes: Codes, *, num_draws: int, rng: np.random.Generator) -> Expected:
        """Returns what is forecast of configurations."""
        columns = self._coding.columns(codes)
        device, loader = self._sides(codes, columns)
        if self._loader is None or self._rest is None:
            draws = self._device.draws(columns, num=num_draws, rng=rng) + self._usual_device(codes)[:, None]
            return Expected(mean=device, draws=draws, device=device, loader=loader)
        devices = self._device.draws(columns, num=num_draws, rng=rng) + self._usual_device(codes)[:, None]
        loaders = self._loader.draws(columns, num=num_draws, rng=rng) + self._usual_loader(codes)[:, None]
        of_rest = self._rest_columns(columns, codes)
        draws = self._together(codes, devices, loaders) + self._rest.draws(of_rest, num=num_draws, rng=rng)
        mean = self._together(codes, device, loader) + self._rest.mean(of_rest)
        return Expected(mean=mean, draws=draws, device=device, loader=loader)

    def supposed(self, configurations: Sequence[Mapping[str, Any]]) -> list[Seen]:
        """Returns configurations as if they had been measured and come out as expected."""
        codes = self._coding.encode(configurations)
        columns = self._coding.columns(codes)
        device, loader = self._sides(codes, columns)
        mean = (
            device
            if self._rest is None
            else self._together(codes, device, loader) + self._rest.mean(self._rest_columns(columns, codes))
        )
        rows = zip(configurations, *(np.exp(values).tolist() for values in (mean, device, loader)), strict=True)
        return [
            Seen(params=params, rate=rate, device_rate=one, loader_rate=other if np.isfinite(other) else None)
            for params, rate, one, other in rows
        ]

    def _sides(self, codes: Codes, columns: Columns) -> tuple[Array, Array]:
        """Returns the logarithms of D and L that are expected."""
        device = self._device.mean(columns) + self._usual_device(codes)
        if self._loader is None:
            return device, np.full(len(codes), np.inf)
        return device, self._loader.mean(columns) + self._usual_loader(codes)

    def _together(self, codes: Codes, device: Array, loader: Array) -> Array:
        """Returns the logarithms of the rates that D and L make, given as logarithms: a row a configuration."""
        workers, threads = (values.reshape(-1, *[1] * (device.ndim - 1)) for values in self._processes(codes))
        rates = combined(np.exp(device), np.exp(loader), workers=workers, threads=threads, machine=self._machine)
        return np.asarray(np.log(rates))

    def _rest_columns(self, columns: Columns, codes: Codes) -> Columns:
        """Returns the columns of what the two sides leave over: all knobs, and what sharing cores costs on this machine."""
        if not self._machine.is_cpu:
            return columns
        crowding = shared_frac(*self._processes(codes), self._machine)[:, None] * CROWDING_SPREAD / REST_USUAL[0]
        return Columns(np.hstack([columns.effects, crowding]), columns.pairs)

    def _device_rates(self, measured: Sequence[Seen], codes: Codes, rates: Array, loader: Array) -> tuple[Array, Array]:
        """Returns D of each trial, read from the rate where cores were shared, and its noise; NaN where it cannot be had."""
        device = np.array([np.nan if trial.device_rate is None else trial.device_rate for trial in measured])
        noise = np.ones(len(measured))
        is_hidden = np.array([trial.is_shared for trial in measured], dtype=bool) & ~np.isfinite(device) & np.isfinite(loader)
        if is_hidden.any():
            workers, threads = self._processes(codes[is_hidden])
            found, factor = device_rate(
                rates[is_hidden], loader[is_hidden], workers=workers, threads=threads, machine=self._machine
            )
            device[is_hidden] = np.where(factor < UNSURE, found, np.nan)
            noise[is_hidden] = READ_OFF_NOISE * np.maximum(factor, 1.0)
        return device, noise

    def _usual_device(self, codes: Codes) -> Array:
        """Returns what is to be expected of the logarithm of D before anything is measured, up to a constant."""
        batch = np.maximum(self._coding.numbers(BATCH, codes, otherwise=1.0), 1.0)
        usual = BATCH_TREND * np.log(batch / (batch + HALF_BATCH)) + self._favour(DEVICE, codes)
        if self._machine.is_cpu and self._machine.num_cores:
            _, threads = self._processes(codes)
            usual += THREADS_TREND * np.log(np.minimum(threads, self._machine.num_cores))
        return np.asarray(usual)

    def _usual_loader(self, codes: Codes) -> Array:
        """Returns the same of L: it grows with the workers where nothing is in their way, up to the cores."""
        workers, _ = self._processes(codes)
        most = max(1.0, self._machine.num_cores or np.inf)
        return np.asarray(np.log(np.clip(workers, 1.0, most)) + self._favour(LOADER, codes))

    def _favour(self, side: str, codes: Codes) -> Array:
        """Returns what an expert expects of his own values, in logarithms."""
        found = np.zeros(len(codes))
        for key, value in self._favoured.items():
            found += FAVOUR * scale(key, side) * self._coding.has(key, value, codes)
        return found

    def _processes(self, codes: Codes) -> tuple[Array, Array]:
        """Returns the loader's workers and the step's threads of each configuration."""
        machine = self._machine
        workers = self._coding.numbers(WORKERS, codes, otherwise=machine.workers)
        return workers, self._coding.numbers(THREADS, codes, otherwise=machine.threads or machine.num_cores or 1.0)


def _rms(errors: Array) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def scale(key: str, side: str) -> float:
    """Returns how much a knob may matter to a side, DEVICE, LOADER or ALL of it together."""
    if side == ALL:
        return 1.0
    of_device, of_loader = ON_BOTH.get(key, (ELSEWHERE, 1.0) if key.startswith(LOADER_PREFIX) else (1.0, ELSEWHERE))
    return of_device if side == DEVICE else of_loader
