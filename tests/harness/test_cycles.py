"""Training that alternates with other work is measured in whole cycles, and mere noise is not mistaken for cycles."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autotune.harness import protocol
from autotune.harness.meter import DONE, STEADY, Meter
from autotune.harness.protocol import MeasureRules
from tests.harness.conftest import Trial

STEPS = [(0.01, 200, 1.0), (0.01, 200, 2.0), (0.005, 600, 0.5), (0.01, 600, 2.0), (0.02, 60, 3.0)]  # step_s, num, pause_s
PHASES = [number / 10 for number in range(10)]
BASELINE = MeasureRules(min_s=6.0)


def alternating(step_s: float, num: int, pause_s: float, *, phase: float = 0.0) -> Iterator[float]:
    """Yields step times with 3 % noise. A pause precedes every `num`-th step."""
    chance = random.Random(round(100 * phase))
    for number in itertools.count(int(phase * num)):
        yield step_s * (1 + chance.uniform(-0.03, 0.03)) + (0 if number % num else pause_s)


def measured(steps: Iterator[float], rules: MeasureRules | None = None, **options: Any) -> Meter:
    meter = Meter(rules or MeasureRules(), **options)
    while meter.phase != DONE:
        meter.feed(next(steps), 8)
    return meter


def window_of(meter: Meter) -> protocol.Window:
    window = meter.window()
    assert window is not None
    return window


def true_per_s(step_s: float, num: int, pause_s: float) -> float:
    return 8 * num / (num * step_s + pause_s)


@pytest.mark.parametrize("rules", [MeasureRules(), MeasureRules(max_s=10.0), MeasureRules(max_s=4.0)])
@pytest.mark.parametrize("kind", STEPS)
def test_a_window_holds_whole_cycles_wherever_they_begin(kind: tuple[float, int, float], rules: MeasureRules) -> None:
    cycle_s = kind[0] * kind[1] + kind[2]
    for phase in PHASES:
        meter = measured(alternating(*kind, phase=phase), rules, cycle={"seconds": cycle_s, "steps": kind[1]})
        window = window_of(meter)
        assert window.rate_per_s == pytest.approx(true_per_s(*kind), rel=0.01)
        assert (window.is_steady, window.steps, len(window.block_s)) == (True, window.cycles * kind[1], window.cycles)
        assert window.cycles >= 2
        assert window.reason.startswith(f"steps come in cycles of {kind[1]} steps in ")


@pytest.mark.parametrize("kind", [kind for kind in STEPS if kind[0] * kind[1] <= 5])
def test_baseline_detects_cycles_without_being_given_their_length(kind: tuple[float, int, float]) -> None:
    for phase in PHASES:
        window = window_of(measured(alternating(*kind, phase=phase), BASELINE))
        assert window.rate_per_s == pytest.approx(true_per_s(*kind), rel=0.02)
        assert window.cycles >= 2


@pytest.mark.parametrize("kind", STEPS)
def test_trial_whose_cycles_are_fast_enough_is_not_raced(kind: tuple[float, int, float]) -> None:
    limit = 0.9 * true_per_s(*kind)
    assert not any(measured(alternating(*kind, phase=phase), race_below_per_s=limit).is_raced for phase in PHASES)


def test_trial_whose_cycles_are_too_slow_is_raced_after_at_least_two_cycles() -> None:
    for phase in PHASES:
        meter = measured(alternating(*STEPS[0], phase=phase), race_below_per_s=1.3 * true_per_s(*STEPS[0]))
        assert meter.is_raced
        assert window_of(meter).cycles >= 2


def test_slower_trial_waits_for_a_cycle_with_as_many_steps_as_in_the_baseline() -> None:
    four_times_slower = alternating(0.04, 200, 4.0, phase=0.5)
    window = window_of(measured(four_times_slower, MeasureRules(max_s=10.0), cycle={"seconds": 3.0, "steps": 200}))
    assert window.rate_per_s == pytest.approx(true_per_s(0.04, 200, 4.0), rel=0.01)


def test_cycles_that_are_too_long_are_reported_and_not_measured() -> None:
    window = window_of(measured(alternating(0.01, 800, 2.0, phase=0.9), MeasureRules(cycles_max_s=9.0, max_s=4.0)))
    assert not window.is_steady
    assert window.reason.startswith(
        "steps come in cycles of 800 steps in 10 s, and the window of at most 9 s holds no whole cycle"
    )
    assert "cycles_max_s=" not in window.reason  # a small budget can lower the limit below the value of this key


def test_window_that_is_cut_off_keeps_only_its_whole_cycles() -> None:
    steps, meter = alternating(*STEPS[0]), Meter(MeasureRules())
    while meter.phase != STEADY or len(meter._gaps()) < 2 or window_of(meter).cycles < 1:
        meter.feed(next(steps), 8)
    for _ in range(100):
        meter.feed(next(steps), 8)
    assert meter.cut_off()
    window = window_of(meter)
    assert (window.cycles, window.is_steady) == (1, True)
    assert window.rate_per_s == pytest.approx(true_per_s(*STEPS[0]), rel=0.01)


def test_window_cut_off_before_a_whole_cycle_is_not_steady() -> None:
    steps, meter = alternating(*STEPS[0], phase=0.9), Meter(MeasureRules(), cycle={"seconds": 3.0, "steps": 200})
    for _ in range(250):
        meter.feed(next(steps), 8)
    assert meter.cut_off()
    assert not window_of(meter).is_steady


def noise(number: int, chance: random.Random) -> float:
    return 0.01 * chance.lognormvariate(0.0, 0.1)


def drift(number: int, chance: random.Random) -> float:
    return 0.01 * (1 + number / 10_000) * chance.lognormvariate(0.0, 0.05)


def short_epochs(number: int, chance: random.Random) -> float:
    return 0.002 * chance.lognormvariate(0.0, 0.05) + (0 if number % 50 else 0.06)


def single_pause(number: int, chance: random.Random) -> float:
    return 0.005 * chance.lognormvariate(0.0, 0.05) + (0.3 if number == 400 else 0)


@pytest.mark.parametrize("made", [noise, drift, short_epochs, single_pause])
def test_noise_drift_short_epochs_and_single_pauses_are_not_cycles(made: Callable[[int, random.Random], float]) -> None:
    rules = MeasureRules(max_s=10.0, warmup_max_s=10.0)
    for seed in range(5):
        chance = random.Random(seed)
        meter = measured((made(number, chance) for number in itertools.count()), rules)
        assert window_of(meter).cycles == 0


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_bursts_of_a_loader_are_not_detected_as_cycles(workers: int) -> None:
    bursts = (0.005 if number % workers else 0.3 for number in itertools.count())
    window = window_of(measured(bursts, width=workers))
    assert window.cycles == 0
    assert window.rate_per_s == pytest.approx(8 * workers / (0.3 + 0.005 * (workers - 1)), rel=0.01)


def test_single_pause_in_a_window_counts_in_full() -> None:
    chance = random.Random(0)
    window = window_of(measured(single_pause(number, chance) for number in itertools.count()))
    assert window.seconds * 200 == pytest.approx(window.steps + 60, rel=0.01)


def test_short_pauses_within_a_cycle_do_not_split_it() -> None:
    steps = ((0.01 + (0 if n % 200 else 1.0)) + (0 if n % 50 else 0.1) for n in itertools.count(30))
    window = window_of(measured(steps))
    assert window.steps % 200 == 0
    assert window.rate_per_s == pytest.approx(8 * 200 / (2.0 + 1.0 + 0.4), rel=0.01)


def rolling_out(meter: Meter, num: int, pause_s: float, most: int) -> protocol.Window:
    """Feeds fewer than `most` updates of 10 ms, with an evaluation of `pause_s` at every `num`-th; returns the window."""
    for number in range(1, most):
        if number % num:
            meter.feed(0.01, 8)
        else:
            meter.feed_evaluation(0.01 + pause_s, 8)
        if meter.phase == DONE:
            break
    return window_of(meter)


@pytest.mark.parametrize(("num", "pause_s"), [(200, 1.0), (10, 0.06), (20, 0.15)])
def test_rollouts_between_updates_count_as_training_time(num: int, pause_s: float) -> None:
    window = rolling_out(Meter(MeasureRules()), num, pause_s, 10_000)
    assert window.rate_per_s == pytest.approx(true_per_s(0.01, num, pause_s), rel=0.02)


def test_rare_evaluations_are_excluded_from_the_window() -> None:
    window = rolling_out(Meter(MeasureRules()), 250 * 20, 5.0, 20_000)
    assert (window.rate_per_s, window.cycles) == (pytest.approx(800.0), 0)
    seen = rolling_out(Meter(MeasureRules(min_s=10.0)), 500, 5.0, 800)
    assert seen.rate_per_s == pytest.approx(800.0)


def test_evaluations_are_excluded_as_in_the_baseline_unless_they_are_frequent() -> None:
    rare = rolling_out(Meter(MeasureRules(), cycle={}), 200, 1.0, 10_000)
    assert (rare.rate_per_s, rare.cycles) == (pytest.approx(800.0), 0)
    often = rolling_out(Meter(MeasureRules(), cycle={}), 10, 0.06, 10_000)
    assert often.rate_per_s == pytest.approx(true_per_s(0.01, 10, 0.06), rel=0.02)


@pytest.mark.thorough
def test_measured_rate_with_rollouts_agrees_with_the_clock_of_the_program(trial: Trial) -> None:
    rules = MeasureRules(warmup_min_device_s=0.2, warmup_mean_frac=0.5, warmup_quartile_frac=0.9, half_width_frac=0.5)
    run = trial("rollouts.py", rules=rules)
    window = run.result().window
    assert window is not None
    assert window.cycles >= 2
    assert (window.is_steady, window.steps) == (True, 100 * window.cycles)
    at = json.loads((run.folder / "rollouts.json").read_text())  # the window covers the last rollouts
    own_s = at[-1] - at[-1 - window.cycles]
    assert window.rate_per_s == pytest.approx(16 * 100 * window.cycles / own_s, rel=0.03)
