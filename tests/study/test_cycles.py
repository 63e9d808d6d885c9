"""Cycles that the baseline detects in a program's steps hold for the whole study."""

import pytest

from autotune.wording import cycles_text
from tests.support.fake_launcher import Surface

CYCLES = "Steps come in cycles of 10 steps in 2 s; the window contains 4 cycles"


def test_cycles_of_the_baseline_are_passed_to_other_trials_and_reported(bench):
    study = bench(Surface(window_s=8.0, cycles=4), minutes=4)
    summary = study.run()
    first, *others = [launch.spec.cycle for launch in study.launcher.launches]
    assert first is None
    assert others
    assert all(told == {"steps": 10.0, "seconds": pytest.approx(2.0)} for told in others)
    assert summary["cycles"] == CYCLES
    assert ("notice", f"{CYCLES}.") in study.listener.calls
    assert study.trials[0].metrics["window_cycles"] == 4


def test_text_for_one_cycle_uses_the_singular():
    metrics = {"window_cycles": 1.0, "window_steps": 21.0, "window_s": 2.88}
    assert cycles_text(metrics) == "Steps come in cycles of 21 steps in 2.88 s; the window contains 1 cycle"


def test_later_trials_are_told_if_the_baseline_found_no_cycles(bench):
    study = bench(Surface(), minutes=4)
    summary = study.run()
    assert [launch.spec.cycle for launch in study.launcher.launches][1:3] == [{}, {}]
    assert summary["cycles"] is None


def test_baseline_looks_longer_for_cycles_than_other_trials_if_time_allows(bench):
    study = bench(Surface(), minutes=4)
    study.run()
    first, second = [launch.spec.rules for launch in study.launcher.launches][:2]
    assert (first.min_s, second.min_s) == (6.0, 2.0)
    short = bench(Surface(), minutes=2)
    short.run()
    rules = short.launcher.launches[0].spec.rules
    assert rules.min_s == rules.max_s == 4.0
