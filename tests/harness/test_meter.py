"""The meter, fed with series of step times whose true rate is known. Needs no torch."""

import itertools
import random
import subprocess
import sys

import pytest

from autotune.harness.blocks import Blocks
from autotune.harness.interval import MERGED_BLOCKS, MIN_BLOCKS, mean_half_width_frac, spread_frac, student_t
from autotune.harness.meter import DONE, STEADY, WARMUP, Meter
from autotune.harness.protocol import MeasureRules
from tests.harness.conftest import REPOSITORY
from tests.harness.test_cycles import measured, window_of


def feed(meter: Meter, step_s: float, steps: int, *, samples: float = 8, is_quiet: bool = True) -> str:
    for _ in range(steps):
        meter.feed(step_s, samples, is_quiet=is_quiet)
    return meter.phase


def feed_until(meter: Meter, step_s: float, phase: str, limit: int = 100_000) -> int:
    for number in range(1, limit):
        if meter.feed(step_s, 8) == phase:
            return number
    raise AssertionError(f"never {phase}")


@pytest.mark.parametrize(
    ("step_s", "least"),
    [(0.001, 1000), (0.01, 100), (0.1, 10)],  # one second of steps
)
def test_warm_up_ends_after_a_second_of_equal_steps(step_s: float, least: int) -> None:
    assert feed_until(Meter(MeasureRules()), step_s, STEADY) == pytest.approx(least, abs=1)


@pytest.mark.parametrize("is_led", [False, True])
def test_a_rank_whose_window_rank_0_ends_needs_no_whole_cycle(is_led: bool) -> None:
    meter = Meter(MeasureRules(), is_led=is_led)
    for number in range(1, 260):
        meter.feed(1.0 if number in (50, 200) else 0.01, 8)  # waits for evaluations of rank 0, one of them in the warm-up
    window = window_of(meter)
    assert window.is_steady is is_led
    assert ("holds no whole cycle" in window.reason) is not is_led


def test_program_with_slow_steps_warms_up_for_two_steps_and_is_measured_for_six() -> None:
    meter = Meter(MeasureRules())
    assert feed_until(meter, 1.0, STEADY) == 2
    assert feed_until(meter, 1.0, DONE) == 6
    window = window_of(meter)
    assert (window.steps, window.rate_per_s, window.half_width_frac, window.is_steady) == (6, 8.0, None, True)


def test_slow_steps_with_a_wide_spread_stop_at_the_cap_for_slow_steps() -> None:
    meter = Meter(MeasureRules())
    feed_until(meter, 1.0, STEADY)
    for number in range(100):
        if meter.feed(0.5 if number % 2 else 2.0, 8) == DONE:
            break
    window = window_of(meter)
    assert 15 <= window.seconds <= 17
    assert "slow steps" in window.reason


def test_compilation_during_warm_up_restarts_the_warm_up() -> None:
    meter = Meter(MeasureRules())
    assert feed(meter, 0.01, 99) == WARMUP
    feed(meter, 5.0, 1, is_quiet=False)
    assert feed(meter, 0.01, 99) == WARMUP
    assert feed(meter, 0.01, 2) == STEADY


def test_rate_that_keeps_changing_is_not_a_steady_state() -> None:
    meter = Meter(MeasureRules(warmup_max_s=5.0))
    while meter.phase == WARMUP:  # each block of five steps is twice or half as fast as the last one
        meter.feed(0.02 if meter.warmup_steps // 5 % 2 else 0.01, 8)
        assert meter.warmup_steps < 10_000
    assert meter.is_steady is False
    assert "no steady state" in meter.reason


def test_program_that_never_stops_compiling_is_measured_but_not_steady() -> None:
    meter = Meter(MeasureRules(warmup_max_s=5.0))
    assert feed(meter, 0.1, 110, is_quiet=False) != WARMUP
    assert meter.is_steady is False


def test_compilation_longer_than_the_warm_up_limit_still_allows_a_steady_state() -> None:
    meter = Meter(MeasureRules(warmup_max_s=5.0))
    feed(meter, 170.0, 1, is_quiet=False)
    feed_until(meter, 0.01, DONE)
    assert (meter.is_steady, meter.reason) == (True, "interval narrow enough")


def test_compilation_inside_the_window_restarts_it() -> None:
    meter = Meter(MeasureRules())
    feed_until(meter, 0.01, STEADY)
    num_before = meter.warmup_steps
    feed(meter, 0.01, 50)
    assert meter.feed(3.0, 8, is_quiet=False) == WARMUP
    left = meter.window()  # what is reported if the program ends now
    assert left is not None
    assert (left.steps, left.is_steady, left.reason) == (50, False, "a graph was compiled inside the window")
    assert meter.warmup_steps == num_before  # counted before the reported window
    assert feed_until(meter, 0.02, STEADY) == pytest.approx(50, abs=1)  # another second of steps
    feed_until(meter, 0.02, DONE)
    assert meter.warmup_steps >= num_before + 51 + 49
    window = window_of(meter)
    assert (window.is_steady, window.rate_per_s) == (True, pytest.approx(400.0))  # the earlier steps are left out


def test_a_program_that_compiles_in_every_window_is_not_steady() -> None:
    meter = Meter(MeasureRules(warmup_max_s=20.0))
    steps = 0
    while meter.phase != DONE:
        steps += 1
        meter.feed(0.01, 8, is_quiet=steps % 150 > 0)
    window = window_of(meter)
    assert window.is_steady is False
    assert window.reason.startswith("graphs are still being compiled after 2")
    assert steps * 0.01 < 20 + 10


def test_warm_up_waits_for_a_draining_queue_up_to_a_limit() -> None:
    meter = Meter(MeasureRules(drain_max_s=3.0))
    meter.is_draining = True
    assert feed(meter, 0.01, 200) == WARMUP
    meter.is_draining = False
    assert feed_until(meter, 0.01, STEADY) <= 5  # the end of a block
    endless = Meter(MeasureRules(drain_max_s=3.0))
    endless.is_draining = True
    assert feed_until(endless, 0.01, STEADY) == pytest.approx(400, abs=6)


def test_a_second_warm_up_waits_as_long_for_a_draining_queue_as_the_first() -> None:
    meter = Meter(MeasureRules(drain_max_s=3.0))
    feed_until(meter, 0.01, STEADY)
    meter.is_draining = True
    meter.feed(0.01, 8, is_quiet=False)  # a late compilation
    assert meter.phase == WARMUP
    assert feed_until(meter, 0.01, STEADY) == pytest.approx(400, abs=8)


def test_bursty_loader_is_measured_in_whole_multiples_of_its_workers() -> None:
    workers = 4
    meter = Meter(MeasureRules(), width=workers)
    # The mean step takes 25 ms, the median step 5 ms.
    bursts = (0.085 if number % workers == 0 else 0.005 for number in range(10**6))
    for step_s in bursts:
        if meter.feed(step_s, 1) == DONE:
            break
    window = window_of(meter)
    assert window.steps % workers == 0
    assert window.rate_per_s == pytest.approx(40.0, rel=0.001)


def test_a_window_cut_off_counts_whole_blocks_only() -> None:
    meter = Meter(MeasureRules(), width=4)
    feed_until(meter, 0.02, STEADY)
    feed(meter, 0.02, 10)
    window = window_of(meter)
    assert window.steps == 8
    assert Meter(MeasureRules()).window() is None


def test_a_window_cut_off_while_a_queue_empties_is_not_steady() -> None:
    """Such a window consumes samples that were made in advance, so its rate cannot last."""
    found = []
    for is_draining in (False, True):
        meter = Meter(MeasureRules(race_min_s=0.2))
        feed_until(meter, 0.02, STEADY)
        meter.is_draining = is_draining
        feed(meter, 0.02, 20)
        assert meter.cut_off()
        window = window_of(meter)
        found.append((window.is_steady, "queue was running empty" in window.reason))
    assert found == [(True, False), (False, True)]


def test_measuring_stops_after_two_seconds_of_equal_steps() -> None:
    meter = Meter(MeasureRules())
    feed_until(meter, 0.01, STEADY)
    assert feed_until(meter, 0.01, DONE) == pytest.approx(200, abs=5)
    window = window_of(meter)
    assert window.reason == "interval narrow enough"


def test_measuring_stops_at_its_cap_or_when_the_interval_no_longer_shrinks() -> None:
    chance = random.Random(0)
    meter = Meter(MeasureRules(half_width_frac=1e-6, max_s=10.0))
    feed_until(meter, 0.01, STEADY)
    for _ in range(10_000):
        if meter.feed(0.01 * chance.lognormvariate(0, 0.2), 8) == DONE:
            break
    window = window_of(meter)
    assert window.seconds <= 10.1
    assert window.reason.startswith(("time cap", "a longer window no longer narrows the interval"))


def test_window_with_correlated_blocks_is_extended() -> None:
    waves = (0.01 * (1 + 0.02 * (number // 100 % 2)) for number in range(10**6))  # one second slow, one second fast
    window = window_of(measured(waves))
    assert window.seconds > 3
    assert len(window.block_s) == len(window.block_rates_per_s)


def test_interval_covers_the_true_rate_in_about_95_percent_of_cases() -> None:
    chance = random.Random(1)
    hits = 0
    for _ in range(400):
        rates = [100 * chance.lognormvariate(0, 0.05) for _ in range(MIN_BLOCKS)]
        width, _ = mean_half_width_frac(rates, [1.0] * len(rates))
        assert width is not None
        mean = sum(rates) / len(rates)
        hits += abs(mean - 100 * 1.00125) <= width * mean
    assert 0.92 <= hits / 400 <= 0.98


def test_few_or_correlated_blocks_give_no_interval() -> None:
    few = [1.0] * (MIN_BLOCKS - 1)
    assert mean_half_width_frac(few, few) == (None, "31 blocks of steps, 32 are needed")
    assert mean_half_width_frac([2.0] * MIN_BLOCKS, [1.0] * MIN_BLOCKS) == (0.0, "")
    width, reason = mean_half_width_frac([90.0] * 50 + [110.0] * 50, [1.0] * 100)  # one slow wave
    assert width is None
    assert "correlated blocks" in reason


def test_interval_weights_blocks_by_their_length() -> None:
    rates, seconds = [100.0, 50.0] * 20, [1.0, 9.0] * 20
    width, _ = mean_half_width_frac(rates, seconds)
    equal, _ = mean_half_width_frac(rates, [1.0] * 40)
    assert width is not None
    assert equal is not None
    assert width != pytest.approx(equal, rel=0.1)


def test_spread_needs_five_blocks() -> None:
    assert spread_frac([1.0, 1.0, 1.0, 1.0]) is None
    assert spread_frac([2.0] * 5) == 0.0


def test_many_blocks_are_merged_because_neighbours_are_correlated() -> None:
    from scipy import stats  # not at the top: every worker of pytest would import it

    rates = [90.0] * 50 + [110.0] * 50  # one slow wave, so the blocks are not independent
    merged, naive = spread_frac(rates), spread_frac(rates[::3][:MERGED_BLOCKS])
    assert merged is not None
    assert naive is not None
    assert merged > 2 * stats.t.ppf(0.975, 99) * 10 / 10 / 100


@pytest.mark.parametrize("degrees", [4, 5, 7, 10, 20, 39, 100])
def test_student_t_quantile_agrees_with_scipy(degrees: int) -> None:
    from scipy import stats

    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.003)


def test_blocks_close_at_a_multiple_of_their_width_after_their_minimum_length() -> None:
    blocks = Blocks(3, 0.05)
    closed = [number for number in range(1, 31) if blocks.add(0.01, 2)]
    assert closed == [6, 12, 18, 24, 30]
    assert blocks.rates_per_s == pytest.approx([200.0] * 5)


def test_meter_and_protocol_import_neither_torch_nor_the_tuner() -> None:
    code = (
        "import sys, autotune.harness.meter, autotune.harness.protocol, autotune.harness.session;"
        "loaded = {name.split('.')[0] for name in sys.modules};"
        "print(sorted(loaded & {'torch', 'optuna', 'mlflow', 'hydra', 'numpy', 'scipy'}),"
        "sorted(name for name in sys.modules if name.startswith('autotune') and not name.startswith('autotune.harness')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['autotune']"


def race(limit_per_s: float, step_s: float, **rules: float) -> Meter:
    source = random.Random(1)
    steps = (step_s * source.lognormvariate(0.0, 0.1) for _ in itertools.count())
    return measured(steps, MeasureRules(**rules), race_below_per_s=limit_per_s)


def test_a_window_that_is_certainly_too_slow_ends_early_and_keeps_its_rate() -> None:
    meter = race(1000.0, 0.01)  # 800 per second
    window = window_of(meter)
    assert window.is_raced
    assert window.is_steady
    assert 1.0 <= window.seconds <= 1.2, "it must be long enough to tell whether it was disturbed"
    assert window.rate_per_s == pytest.approx(800, rel=0.05)
    assert len(window.block_rates_per_s) >= 5
    assert "slower than 0.8 times" in window.reason


@pytest.mark.parametrize("limit_per_s", [790.0, 600.0])
def test_a_window_that_may_be_fast_enough_is_measured_to_the_end(limit_per_s: float) -> None:
    window = window_of(race(limit_per_s, 0.01))
    assert not window.is_raced
    assert window.seconds >= 2.0


def test_window_of_slow_steps_is_raced_too() -> None:
    window = window_of(race(10.0, 1.0, half_width_frac=0.001))  # 8 per second
    assert window.is_raced
    assert window.steps < 15


def test_trial_that_would_win_is_not_raced_in_300_simulations() -> None:
    lost = 0
    for seed in range(300):  # a quarter faster than the limit, with correlated steps
        meter = Meter(MeasureRules(max_s=4.0, half_width_frac=0.001), race_below_per_s=640.0)
        source, drift = random.Random(seed), 0.0
        while meter.phase != DONE:
            drift = 0.9 * drift + source.gauss(0.0, 0.05)
            meter.feed(0.01 * (1 + drift) * source.lognormvariate(0.0, 0.1), 8)
        lost += meter.is_raced
    assert lost == 0


def promoted(above_per_s: float | None, *, spread_frac: float = 0.08, **rules: float) -> Meter:
    source = random.Random(1)
    steps = (0.05 * (1 + source.gauss(0, spread_frac)) for _ in itertools.count())  # 160 per second
    return measured(steps, MeasureRules(**rules), promote_above_per_s=above_per_s)


def half_width(meter: Meter) -> float:
    width = spread_frac(meter._window.rates_per_s)
    assert width is not None
    return width


def test_candidate_for_the_best_is_measured_with_a_narrower_interval() -> None:
    plain, far, near = (promoted(above_per_s, promoted_max_s=60.0) for above_per_s in (None, 200.0, 161.0))
    assert window_of(far).seconds == window_of(plain).seconds
    assert 0.01 < half_width(plain) <= 0.03
    assert half_width(near) < 0.7 * half_width(plain)


def test_measuring_a_narrower_interval_has_its_own_time_limit() -> None:
    window = window_of(promoted(161.0, spread_frac=0.2, promoted_max_s=4.0, half_width_frac=0.2))
    assert 4.0 <= window.seconds <= 4.5
