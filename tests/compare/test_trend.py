"""What is reported about a machine that changes during the finals, on simulated rounds whose trend is known."""

import math

import numpy as np
import pytest

from autotune.compare.trend import LEVEL, trend
from autotune.records import Kind
from tests.support.records import a_trial

RATES = {0: 13.6, 1: 28.5}


def finals(arms, rates):
    return [
        a_trial(5 + at, kind=Kind.final, value=rate, repeats=arm)
        for at, (arm, rate) in enumerate(zip(arms, rates, strict=True))
    ]


def simulated(rng, *, rounds, slope, noise):
    arms = [arm for _ in range(rounds) for arm in rng.permutation(list(RATES))]
    return finals(arms, [RATES[arm] * math.exp(slope * at + noise * rng.normal()) for at, arm in enumerate(arms)])


def test_rates_that_fall_together_are_reported_with_the_slowdown():
    """The finals of a real study on a machine whose other guests became busy."""
    said = trend(finals([1, 0, 0, 1, 0, 1], [30.6, 14.4, 13.5, 28.5, 12.9, 26.5]))
    assert said.startswith(
        "the machine became slower by 14 % during the comparison: the rates of the baseline and trial 1 fell"
    )
    assert "(trend clear at the 1 % level). The ratio is still valid: it compares only runs" in said


def test_rates_that_rise_together_are_reported_with_the_speedup():
    assert "faster by 21 %" in trend(finals([0, 1] * 4, [10.0, 20.1, 10.6, 21.1, 11.1, 22.4, 11.8, 23.6]))


@pytest.mark.parametrize("rounds", [2, 3, 5, 8])
def test_rate_of_false_alarms_is_at_most_the_stated_level(rounds):
    rng, num = np.random.default_rng(rounds), 1000
    seen = sum(bool(trend(simulated(rng, rounds=rounds, slope=0.0, noise=0.05))) for _ in range(num))
    assert seen <= num * LEVEL + 3 * math.sqrt(num * LEVEL)


def test_clear_trend_is_detected():
    rng = np.random.default_rng(1)
    assert sum(bool(trend(simulated(rng, rounds=5, slope=-0.02, noise=0.02))) for _ in range(100)) >= 95


@pytest.mark.parametrize(
    "rates",
    [
        [10.0, 20.0, 9.0, 22.0, 8.0, 24.0],  # one rate falls and the other rises, so the machine is not the cause
        [10.0, 20.0, 9.99, 19.97, 9.98, 19.96],  # too little to mention
        [10.0, 20.0],
    ],
)
def test_changes_that_the_machine_does_not_explain_are_not_reported(rates):
    assert trend(finals([0, 1] * (len(rates) // 2), rates)) == ""


def test_measurements_of_only_one_configuration_show_no_trend():
    assert trend(finals([0] * 4, [10.0, 9.0, 8.0, 7.0])) == ""
    assert trend([]) == ""
