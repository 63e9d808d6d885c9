"""A trend in a window's step times is distinguished from mere noise. The step times are simulated under fixed seeds."""

import math
import random
from collections.abc import Callable, Iterator

import pytest

from autotune.harness.blocks import trend
from autotune.harness.meter import DONE, STEADY, WARMUP, Meter
from autotune.harness.protocol import MeasureRules
from tests.harness.test_cycles import measured, window_of

Steps = Iterator[float]


def independent(step_s: float, cv: float, chance: random.Random) -> Steps:
    while True:
        yield step_s * math.exp(cv * chance.gauss(0, 1))


def autocorrelated(step_s: float, cv: float, chance: random.Random) -> Steps:
    state = chance.gauss(0, 1)  # the stationary distribution
    while True:
        yield step_s * math.exp(cv * state)
        state = 0.7 * state + math.sqrt(1 - 0.7**2) * chance.gauss(0, 1)


def bursty(step_s: float, cv: float, chance: random.Random) -> Steps:
    while True:  # four workers: three batches are ready, and the step waits for the fourth
        yield from (0.1 * step_s, 0.1 * step_s, 0.1 * step_s, chance.gammavariate(1 / cv**2, 3.7 * step_s * cv**2))


def is_flagged(meter: Meter) -> bool:
    return not meter.is_steady and meter.reason.startswith("the step time keeps")


@pytest.mark.parametrize("kind", [independent, autocorrelated, bursty])
@pytest.mark.parametrize(
    ("step_s", "cv"), [(0.06, 0.3), *(pytest.param(*row, marks=pytest.mark.thorough) for row in ((0.02, 0.1), (1.2, 0.6)))]
)
def test_steady_programs_are_rarely_flagged_as_changing(
    kind: Callable[[float, float, random.Random], Steps], step_s: float, cv: float
) -> None:
    chance = random.Random(4)
    flagged = [is_flagged(measured(kind(step_s, cv, chance), width=4 if kind is bursty else 1)) for _ in range(100)]
    assert sum(flagged) <= 2


@pytest.mark.parametrize("step_s", [0.005, 0.05, 0.6])
def test_growing_step_time_is_flagged_with_its_growth(step_s: float) -> None:
    chance = random.Random(2)
    growth = 1 + 0.08 * step_s  # 8 % per second
    meter = measured(step_s * growth**number * math.exp(0.03 * chance.gauss(0, 1)) for number in range(10**6))
    assert is_flagged(meter)
    assert "keeps growing: +" in meter.reason


def test_program_that_settles_late_is_measured_after_it_has_settled() -> None:
    def settling() -> Steps:
        seconds = 0.0
        while True:
            step_s = 0.01 * (1 + 0.5 * math.exp(-seconds / 1.5))
            seconds += step_s
            yield step_s

    meter = measured(settling())
    window = window_of(meter)
    assert window.is_steady
    assert window.rate_per_s == pytest.approx(800.0, rel=0.03)


def test_trial_that_slows_down_in_its_window_is_not_stopped_as_slow() -> None:
    chance, meter, number = random.Random(2), Meter(MeasureRules(), race_below_per_s=400.0), 0
    for phase in (WARMUP, STEADY):  # 8 % slower each second, until the window is restarted
        while meter.phase == phase:
            number += 1
            meter.feed(0.01 * 1.0008**number * math.exp(0.03 * chance.gauss(0, 1)), 8)
    assert meter.phase == WARMUP
    while meter.phase != DONE:
        meter.feed(0.03 * math.exp(0.03 * chance.gauss(0, 1)), 8)  # 267 per second, as if another program disturbed it
    assert not meter.is_raced
    assert window_of(meter).seconds >= MeasureRules().min_s


def test_trend_is_the_relative_change_of_the_step_time() -> None:
    doubling = [100.0 * 2 ** (-number / 20) for number in range(20)]
    assert trend(doubling).moved_frac == pytest.approx(1.0)
    assert trend(doubling[::-1]).moved_frac == pytest.approx(-0.5)
    assert not trend([100.0] * 20).is_suspect
    assert not trend(doubling[:4]).is_suspect
