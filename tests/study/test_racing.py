"""Trials that are certainly too slow are not measured to the end."""

import pytest

from autotune.records import Kind, Outcome
from autotune.trials.session import RACED_FRAC
from tests.support.fake_launcher import Surface

FAST = {("precision.amp", "bf16"): 3.0, ("layout.channels_last", True): 1.2}
SLOW = {**FAST, ("optimizer.implementation", "fused"): 0.5}


def limits(study):
    return {launch.spec.trial: launch.spec.race_below_per_s for launch in study.launcher.launches}


def test_only_search_trials_race_against_the_best_so_far(bench):
    study = bench(Surface(gains=SLOW), "search.sampler=tpe", minutes=12)
    summary = study.run()
    raced = [trial for trial in study.trials if trial.outcome is Outcome.raced]
    assert raced
    for trial in raced:
        able = [t for t in study.trials if t.number < trial.number and t.outcome is Outcome.ok and t.ci and t.repeats is None]
        best = max((t for t in able if t.tier.rank <= trial.tier.rank), key=lambda t: t.ci[0])
        assert limits(study)[trial.number] == pytest.approx(RACED_FRAC * best.ci[0])
        assert trial.value < best.value
    assert {limits(study)[trial.number] for trial in study.trials if trial.kind != "search"} == {None}
    assert summary["speedup"]["verdict"] == "faster"
    assert summary["counts"]["raced"] == len(raced)


def test_raced_trial_keeps_its_value_but_cannot_win(bench):
    study = bench(Surface(gains=SLOW), "search.sampler=tpe", minutes=12)
    summary = study.run()
    raced = {trial.number for trial in study.trials if trial.outcome is Outcome.raced}
    assert raced
    assert all(trial.value and trial.ci for trial in study.trials if trial.number in raced)
    assert summary["best"]["trial"] not in raced
    assert not raced & {trial.repeats for trial in study.trials if trial.kind is Kind.final}


def test_best_of_a_lower_tier_is_not_ended_by_racing(bench):
    study = bench(Surface(gains=FAST), minutes=6)
    tiers = study.run()["best_by_tier"]
    by_number = {trial.number: trial for trial in study.trials}
    exact = by_number[tiers["exact"]["trial"]]
    assert exact.kind is Kind.search
    assert exact.outcome is Outcome.ok
    limit = limits(study)[exact.number]
    assert limit is None or limit < exact.value


def test_racing_can_be_switched_off(bench):
    study = bench(Surface(gains=SLOW), "measure.racing=false")
    summary = study.run()
    assert set(limits(study).values()) == {None}
    assert "raced" not in summary["counts"]


def test_trials_do_not_race_against_a_rate_without_an_interval(bench, monkeypatch):
    study = bench(Surface(gains=FAST), "study.budget.trials=3")
    monkeypatch.setattr("autotune.trials.trial_metrics.interval", lambda results: None)
    study.run()
    assert set(limits(study).values()) == {None}
