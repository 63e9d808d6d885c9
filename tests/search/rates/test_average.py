"""Forecasts averaged over `waiting`, from 0 to 1: how much a step's threads wait for workers on shared cores."""

import math

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution

from autotune.search.rates.average import AveragedForecast
from autotune.search.rates.coding import Coding
from autotune.search.rates.history import Seen
from autotune.search.rates.regime import Machine, combined

CPU, GPU = Machine(num_cores=16, is_cpu=True), Machine(num_cores=16)
WORKERS, BATCH = "loader.num_workers", "loader.batch_size"
CODING = Coding({WORKERS: CategoricalDistribution([0, 1, 2, 4, 8, 16]), BATCH: CategoricalDistribution([8, 16, 32])})
MANY_WORKERS = [(0, 8), (0, 16), (8, 8), (8, 16), (8, 32), (16, 16), (16, 32)]


def true_rates(workers, batch, waiting):
    """Returns rate, D (step alone) and L (loader alone) of a program whose 16 threads share 16 cores with the workers."""
    device, loader = 900 * batch / (batch + 8), 280.0 * max(workers, 1)
    arrays = (np.array([float(value)]) for value in (device, loader, workers, 16))
    device_array, loader_array, num_workers, threads = arrays
    how = {"workers": num_workers, "threads": threads, "machine": CPU, "waiting": waiting}
    return float(combined(device_array, loader_array, **how)[0]), device, loader


def trials(configurations, waiting):
    found = []
    for workers, batch in configurations:
        rate, device, loader = true_rates(workers, batch, waiting)
        shares = workers > 0
        params = {WORKERS: workers, BATCH: batch}
        found.append(
            Seen(params=params, rate=rate, loader_rate=loader, device_rate=None if shares else device, is_shared=shares)
        )
    return found


def forecast(configurations, waiting, machine=CPU):
    return AveragedForecast(CODING, trials(configurations, waiting), machine)


def of(expected_by, workers, batch, beside=(8, 32)):
    """Returns the expected log rate of a configuration, and the standard deviation of its difference from that of `beside`."""
    codes, reference = CODING.encode([{WORKERS: workers, BATCH: batch}, {WORKERS: beside[0], BATCH: beside[1]}])[:, None]
    expected = expected_by.expected(codes, reference)
    return float(expected.mean[0]), float(expected.spread[0])


@pytest.mark.parametrize("waiting", [0.0, 1.0])
@pytest.mark.parametrize("workers", [2, 4])
def test_trials_with_many_workers_predict_the_rate_with_few_workers(waiting, workers):
    """If threads are assumed to wait but do not, the forecast for two workers is 43 % too low, 3.7 standard deviations."""
    mean, spread = of(forecast(MANY_WORKERS, waiting), workers, 32)
    error = math.log(true_rates(workers, 32, waiting)[0]) - mean
    assert abs(error) < 0.15
    assert abs(error) < 2.5 * spread


def test_forecast_allows_a_gain_and_a_loss_before_workers_are_tried():
    unknown = forecast([(0, 8), (0, 16), (0, 32)], 1.0)
    mean, spread = of(unknown, 4, 32, beside=(0, 32))
    reference, _ = of(unknown, 0, 32, beside=(0, 32))
    for waiting in (0.0, 1.0):
        gain = math.log(true_rates(4, 32, waiting)[0] / true_rates(0, 32, waiting)[0])
        assert abs(gain - (mean - reference)) < 2 * spread


def test_samples_and_expected_rates_agree():
    found = forecast(MANY_WORKERS[:4], 0.0)
    codes = CODING.encode([{WORKERS: 8, BATCH: 32}, {WORKERS: 2, BATCH: 32}])
    draws = found.draws(codes, num=4000, rng=np.random.default_rng(0))
    mean, spread = of(found, 2, 32)
    reference, _ = of(found, 8, 32)
    assert draws.shape == (2, 4000)
    assert np.mean(draws[1] - draws[0]) == pytest.approx(mean - reference, abs=0.05)
    assert np.std(draws[1] - draws[0]) == pytest.approx(spread, rel=0.25)


def test_gpu_has_a_single_forecast():
    assert len(forecast(MANY_WORKERS, 1.0, GPU).scales) == 1


@pytest.mark.parametrize("waiting", [0.0, 1.0])
def test_conditioning_on_expected_results_keeps_rates_and_narrows_spreads(waiting):
    found, codes = forecast(MANY_WORKERS, waiting), CODING.encode([{WORKERS: 0, BATCH: 32}, {WORKERS: 4, BATCH: 64}])
    narrower = found.conditioned(codes)
    before, after = (one.expected(codes, CODING.encode([{WORKERS: 8, BATCH: 16}])) for one in (found, narrower))
    for name in ("mean", "device", "loader"):
        assert getattr(after, name) == pytest.approx(getattr(before, name))
    assert (after.own_spread < before.own_spread).all()
    assert (after.spread < before.spread).all()
    draws = narrower.draws(codes, num=4000, rng=np.random.default_rng(0))
    assert draws.std(axis=1) == pytest.approx(after.own_spread, rel=0.1)
