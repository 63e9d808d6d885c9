"""A study ends within its budget, however long its trials take, and still reaches a verdict."""

import dataclasses
import random

import pytest

from autotune.errors import NothingWorked
from autotune.harness.meter import DONE, STEADY, Meter
from autotune.harness.protocol import MeasureRules
from autotune.records import Outcome
from tests.study.conftest import RATES
from tests.support.fake_launcher import Failure, Surface
from tests.support.rows import more

HUNG_S = 1e6


@dataclasses.dataclass(kw_only=True)
class Moody(Surface):
    """A program whose starts take up to `up_to` times as long as the baseline's. Some of its starts hang."""

    dice: random.Random = dataclasses.field(default_factory=random.Random)
    up_to: float = 1.0
    hangs_frac: float = 0.0
    num_started: int = 0

    def start_of_s(self, knobs):
        self.num_started += 1
        start_s = super().start_of_s(knobs)
        if self.num_started == 1:
            return start_s
        return HUNG_S if self.dice.random() < self.hangs_frac else start_s * self.dice.uniform(1.0, self.up_to)


def program(seed):
    """Returns a budget in minutes and a program whose baseline fits it."""
    dice = random.Random(seed)
    minutes, start_s, window_s = dice.uniform(1, 10), 1.5 * 30 ** dice.random(), dice.uniform(2, 12)
    surface = Moody(
        dice=dice,
        start_s=min(start_s, 25 * minutes),
        window_s=window_s,
        compile_s=dice.choice([5.0, 50.0, 120.0]),
        leave_s=dice.uniform(0.0, 2.5),
        stop_s=dice.uniform(0.0, 2.0),
        up_to=dice.choice([1.0, 1.3, 2.5]),
        hangs_frac=dice.choice([0.0, 0.0, 0.1]),
    )
    return minutes, with_gains(surface)


def with_gains(surface):
    surface.gains = {("precision.amp", "bf16"): 1.4, ("compile.mode", "default"): 1.5}
    surface.losses = lambda knobs, seed: [2.0 / (step + 1) for step in range(20)]
    return surface


@pytest.mark.parametrize("sampler", ["tpe", "rates"])
@pytest.mark.parametrize("seed", [*range(4), *more(*range(4, 12))])
def test_a_study_whose_baseline_fits_ends_within_its_budget(bench, seed, sampler):
    minutes, surface = program(seed)
    it = bench(surface, f"search.sampler={sampler}", seed=seed, minutes=minutes)
    begun_s = it.clock.now_s
    summary = it.run()
    assert it.clock.now_s - begun_s <= 60 * minutes
    assert summary["status"] == "complete"
    assert len(it.trials) > 1, "something besides the baseline was tried"


@pytest.mark.parametrize(("minutes", "start_s"), [(1, 1.5), (2, 4), (3, 8), (8, 25), (8, 40)])
def test_finals_reach_a_confidence_interval_in_time(bench, minutes, start_s):
    it = bench(with_gains(Surface(start_s=start_s, window_s=6.0, leave_s=0.5)), RATES, minutes=minutes)
    begun_s = it.clock.now_s
    found = it.run()["speedup"]
    assert it.clock.now_s - begun_s <= 60 * minutes
    assert found["ci"] is not None
    assert found["verdict"] == "faster" or minutes == 1


def test_time_that_a_command_took_before_its_study_counts_against_the_budget(bench):
    it = bench(with_gains(Surface()), minutes=2)
    began_s = it.clock.now_s
    it.clock.sleep(30)
    it.inputs = dataclasses.replace(it.inputs, began_s=began_s)
    summary = it.run()
    assert it.clock.now_s - began_s <= 120
    assert summary["seconds"]["total"] == pytest.approx(it.clock.now_s - began_s, abs=2)


def test_trial_whose_time_is_up_is_measured_by_its_partial_window(bench):
    surface = Surface(window_s=40.0, leave_s=1.0, extra_start_s={("precision.amp", "bf16"): 116.0})
    it = bench(surface, RATES, "measure.screening.min_s=30", "measure.screening.max_s=40", minutes=4)
    it.run()
    cut = next(trial for trial in it.trials if trial.knobs["precision.amp"] == "bf16")
    assert cut.outcome is Outcome.ok
    assert 1.0 <= cut.phases_s["steady"] < 30.0 < it.trials[0].phases_s["steady"]


def test_window_that_never_gets_full_is_cut_off_before_the_limit_of_its_trial(bench):
    surface = Surface(window_s=2.0, leave_s=1.0)
    surface.failures = lambda number, knobs: setattr(surface, "window_s", 500.0 if number == 1 else 2.0)
    it = bench(surface, RATES, "measure.screening.max_s=600", "study.budget.trials=3", minutes=60)
    it.run()
    limit_s, unsteady = it.launcher.launches[1].deadlines.total_s, it.trials[1]
    assert unsteady.outcome is Outcome.ok, unsteady.reason
    assert limit_s / 2 < unsteady.seconds < limit_s


def test_trial_whose_time_is_up_before_its_window_is_recorded_as_interrupted(bench):
    dice = random.Random(1)
    it = bench(with_gains(Moody(dice=dice, start_s=20.0, up_to=30.0)), minutes=2.2)
    it.run()
    stopped = [record for record in it.trials if record.reason.startswith("the trial's time was up")]
    assert stopped
    assert {record.outcome for record in stopped} == {Outcome.interrupted}


def test_a_trial_is_asked_to_finish_before_its_time_is_up(bench):
    it = bench(with_gains(Surface(leave_s=2.0)), minutes=2)
    begun_s = it.clock.now_s
    it.run()
    ends_s = [launch.spec.end_s for launch in it.launcher.launches]
    assert ends_s[0] is None, "without a baseline, a study has no result"
    assert all(begun_s < end_s <= begun_s + 120 - 2.0 for end_s in ends_s[1:])


def test_without_a_budget_in_minutes_trials_have_no_end_time(bench):
    it = bench(with_gains(Surface()), "study.budget.trials=3", minutes="null")
    it.run()
    assert {launch.spec.end_s for launch in it.launcher.launches} == {None}


def test_baseline_that_uses_up_the_budget_is_completed_and_no_other_trial_starts(bench):
    it = bench(with_gains(Surface(start_s=50.0)), minutes=0.9)
    summary = it.run()
    assert [trial.outcome for trial in it.trials] == [Outcome.ok]
    assert "give study.budget.minutes=" in summary["reason"]


def test_study_gives_up_in_time_if_its_baseline_crashes_and_then_hangs(bench):
    surface = Surface(start_s=29.0)
    surface.failures = lambda number, knobs: Failure(signal="SIGSEGV", cause="exit") if surface.start_s == 29.0 else None
    it = bench(surface, minutes=1)
    begun_s = it.clock.now_s
    pause = it.clock.sleep
    it.clock.sleep = lambda seconds: (pause(seconds), setattr(surface, "start_s", HUNG_S))  # makes the second attempt hang
    with pytest.raises(NothingWorked):
        it.run()
    assert len(it.launcher.launches) == 2
    assert it.clock.now_s - begun_s <= 61


def test_window_that_is_cut_off_keeps_its_measurement():
    meter = Meter(MeasureRules())
    while meter.phase != STEADY:
        meter.feed(0.01, 32)
    meter.feed(0.01, 32)
    assert not meter.cut_off(), "one step is too little"
    while meter.phase == STEADY and meter.window().seconds < 1.2:
        meter.feed(0.01, 32)
    assert meter.cut_off()
    assert meter.phase == DONE
    assert meter.window().rate_per_s == pytest.approx(3200, rel=1e-6)
    assert meter.window().reason == "the trial's time was up"
