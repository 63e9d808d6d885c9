"""A short trial's prediction against the true long-run rate, in simulated time, with the harness's own rules."""

from types import SimpleNamespace

import pytest

from autotune.harness import supply
from autotune.harness.meter import DONE, STEADY, WARMUP, Meter
from autotune.harness.protocol import SEPARATE, SHARED, MeasureRules
from autotune.harness.session import LOOK_S
from autotune.harness.supply import Supply
from tests.harness.queue_model import Program, Simulation
from tests.harness.test_cycles import window_of

BATCH = 8
LONG_STEPS = 6000


def predicted(program: Program, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> tuple[float, str | None, Meter]:
    """Runs a simulated trial, fed as a session feeds its meter; returns its samples per second, its regime and its meter."""
    simulation = Simulation(program, seed)
    training = SimpleNamespace(
        num_workers=program.workers, counters_file="x", total_samples=BATCH, total_batches=1, num_at_once=1
    )
    training.mark_iterators = lambda: None
    found, rules = Supply(SimpleNamespace(training=training)), MeasureRules()
    monkeypatch.setattr(Supply, "read", lambda self: simulation.reading())
    monkeypatch.setattr(supply, "GLANCE_S", 0.0)
    monkeypatch.setattr(supply, "num_cores", lambda: program.cores)
    meter, steps = Meter(rules, max(1, program.workers)), simulation.steps()
    last_s = next(steps)
    while meter.phase != DONE:
        look_s, seen = last_s + LOOK_S, []
        while last_s < look_s:
            end_s = next(steps)
            seen.append(end_s - last_s)
            last_s = end_s
        if meter.phase == WARMUP:
            meter.is_draining = found.drains_within(rules.drain_max_s)
        while meter.phase == WARMUP and seen:
            if meter.feed(seen.pop(0), BATCH) == STEADY:
                found.open_window()
        if meter.phase == STEADY:
            meter.is_draining = found.is_falling
            meter.feed_window(seen, [BATCH] * len(seen))
    found.close_window()
    window = window_of(meter)
    regime = found.regime(program.threads if program.step_cpu_s else None)
    return found.lasting_per_s(window.rate_per_s, found.capacity_per_s()), regime, meter


def true_per_s(program: Program, seed: int = 1) -> float:
    """Returns the rate of the second half of a long run."""
    ends = [end_s for end_s, _ in zip(Simulation(program, seed).steps(), range(LONG_STEPS), strict=False)]
    half = LONG_STEPS // 2
    return BATCH * (LONG_STEPS - half) / (ends[-1] - ends[half - 1])


@pytest.mark.parametrize(
    "program",
    [
        Program(workers=1, prefetch=8, batch_sleep_s=0.02, step_sleep_s=0.012),
        Program(workers=2, prefetch=4, batch_sleep_s=0.044, step_sleep_s=0.02),
        Program(workers=4, prefetch=4, batch_sleep_s=0.1, step_sleep_s=0.011),
        Program(workers=4, prefetch=4, batch_sleep_s=0.082, step_sleep_s=0.02),  # the queue drains for 600 steps
        Program(workers=8, prefetch=16, batch_sleep_s=0.2, step_sleep_s=0.02),
        Program(workers=2, batch_sleep_s=0.01, step_sleep_s=0.02),  # device-bound
        Program(workers=2, batch_sleep_s=2.4, step_sleep_s=1.05),  # slow steps, and the window ends before the queue is empty
        Program(workers=2, prefetch=8, batch_sleep_s=0.03, batch_cpu_s=0.01, step_cpu_s=0.012),  # enough cores
    ],
)
def test_predictions_hold_if_workers_have_their_own_cores(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    found, regime, meter = predicted(program, monkeypatch)
    assert regime == SEPARATE
    assert meter.is_steady, meter.reason
    assert found == pytest.approx(true_per_s(program), rel=0.03)


@pytest.mark.parametrize(
    "program",
    [
        Program(workers=1, prefetch=4, batch_cpu_s=0.02, step_cpu_s=0.03, threads=2),
        Program(workers=1, prefetch=16, batch_cpu_s=0.02, step_cpu_s=0.03, threads=2),
        Program(workers=2, prefetch=8, batch_cpu_s=0.03, step_cpu_s=0.03, threads=2),
        Program(workers=1, prefetch=300, batch_cpu_s=0.02, step_cpu_s=0.03, threads=2, stall_s=9.0),  # drains for 30 s
        Program(workers=2, prefetch=300, batch_cpu_s=0.06, step_cpu_s=0.03, threads=2, stall_s=25.0),
        Program(workers=4, prefetch=2, batch_cpu_s=0.02, step_cpu_s=0.04, threads=2),
        Program(workers=4, prefetch=32, batch_cpu_s=0.02, step_cpu_s=0.01, threads=2),
        Program(workers=2, prefetch=8, batch_sleep_s=0.02, batch_cpu_s=0.02, step_cpu_s=0.03, threads=2),
        Program(workers=1, prefetch=8, batch_cpu_s=0.06, step_cpu_s=0.02, threads=2),  # one worker alone is too slow
        Program(workers=8, prefetch=4, batch_cpu_s=0.1, step_sleep_s=0.02, step_cpu_s=0.004, cores=4),  # a GPU's host
        Program(workers=2, prefetch=2, batch_cpu_s=0.004, step_cpu_s=0.06, threads=2),  # device-bound nevertheless
        Program(workers=2, prefetch=1, batch_cpu_s=0.9, step_cpu_s=0.9, threads=2),  # slow steps
    ],
)
def test_predictions_hold_if_workers_and_steps_share_the_cores(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    found, regime, meter = predicted(program, monkeypatch)
    assert regime == SHARED
    assert meter.is_steady, meter.reason
    assert found == pytest.approx(true_per_s(program), rel=0.03)


def test_predictions_of_bursty_loaders_hold_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(workers=4, prefetch=2, batch_sleep_s=0.024, cv=0.5, step_sleep_s=0.003)
    truth = true_per_s(program)
    errors = [predicted(program, monkeypatch, seed)[0] / truth - 1 for seed in range(2, 12)]
    assert abs(sum(errors) / len(errors)) < 0.02
    assert max(map(abs, errors)) < 0.06
