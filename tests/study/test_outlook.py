"""What a study says about its total time, the time left, and when its result pays off."""

import itertools

import pytest

from autotune.cli.plain import plan_text
from autotune.clock import VirtualClock
from autotune.compare.break_even import search_cost
from autotune.quantities import seconds_text
from autotune.records import Kind, Outcome, TrialRecord
from autotune.trials.budget import Budget, outlook
from autotune.trials.events import Outlook
from tests.study.test_explaining import documents
from tests.support.fake_launcher import Surface

FAST = {("precision.amp", "bf16"): 1.8}
FASTER = {"ratio": 2.0, "ci": [1.5, 3.0], "verdict": "faster"}
UNDECIDED = {"ratio": 1.1, "ci": [0.8, 1.5], "verdict": "ambiguous", "overrides": {"layout.channels_last": True}}


def trial(seconds, *, number=1, kind=Kind.search, outcome=Outcome.ok, **phases_s):
    return TrialRecord(number=number, kind=kind, knobs={}, changed={}, outcome=outcome, seconds=seconds, phases_s=phases_s)


def test_plan_is_accurate_and_the_time_left_decreases_before_each_trial(bench):
    study = bench(Surface(gains=FAST), "search.stop=false", minutes=4)
    summary = study.run()
    (inputs,) = study.listener.named("planned")
    names = [name for name, _ in study.listener.calls if name in ("trial_ended", "planned", "trial_started")]
    assert names[:4] == ["trial_started", "trial_ended", "planned", "trial_started"]
    searched = [one for one in study.trials if one.kind is Kind.search]
    assert 0.6 * len(searched) <= inputs.num_trials <= 1.5 * len(searched)
    assert 0 < inputs.search_s < inputs.left_s < summary["budget_s"]
    assert summary["search_cost"]["trials"] == len(searched)
    left = study.listener.named("time_left")
    assert len(left) == len(study.trials) - 1, "before each trial but the first"
    assert all(later.left_s < earlier.left_s for earlier, later in itertools.pairwise(left))
    kinds = [one.kind for one in study.trials[1:]]
    assert [one.search_s is None for one in left] == [kind is not Kind.search for kind in kinds]


@pytest.mark.thorough
def test_time_left_still_decreases_when_the_passes_use_their_reserved_time(bench, tiny):
    study = bench(Surface(gains=FAST, documents=documents), "explain.auto=true", *tiny, minutes=20)
    study.run()
    left, kinds = study.listener.named("time_left"), [one.kind for one in study.trials[1:]]
    assert Kind.explain in kinds
    assert all(later.left_s < earlier.left_s for earlier, later in itertools.pairwise(left))
    assert [one.explain_s > 0 for one in left] == [kind not in (Kind.explain, Kind.check) for kind in kinds]
    (plan,) = study.listener.named("planned")
    assert plan_text(plan).endswith(f" and {seconds_text(plan.explain_s)} to explain the result")


@pytest.mark.parametrize("seconds", [25, 30, 35, 75])
def test_plan_has_no_trial_if_and_only_if_none_fits(bench, seconds):
    study = bench(Surface(gains=FAST), minutes=seconds / 60)
    study.run()
    (plan,) = study.listener.named("planned")
    is_any_tried = any(one.kind is Kind.search for one in study.trials[1:])
    assert (plan.num_trials > 0) is is_any_tried, plan
    assert plan_text(plan).startswith("room for" if is_any_tried else "no room")


def test_plan_states_the_full_time_of_the_only_trial():
    plan = Outlook(left_s=110.0, search_s=18.0, num_trials=1, trial_s=25.0)
    assert plan_text(plan).startswith("room for 1 trial in 25 s, about 25 s each")
    assert plan_text(plan).endswith("then at most 1 min 25 s for the finals")


def test_one_more_trial_takes_no_time_from_the_finals():
    """The trial fits only by rounding: the search has 50 s left, and a trial takes 99 s. A resumed study might not start it."""
    plan = Outlook(left_s=80.0, search_s=50.0, num_trials=1, trial_s=99.0, num_searched=3)
    assert plan_text(plan).startswith("room for 1 more trial in 50 s")
    assert plan_text(plan).endswith("then at most 30 s for the finals")


def test_plan_without_minutes_is_bounded_by_the_number_of_trials():
    budget = Budget(clock=VirtualClock(), total_s=None, max_trials=5)
    baseline, seconds = trial(20.0, number=0, kind=Kind.baseline), [8.0]
    found = outlook(budget, baseline, seconds, warm_spares_s=0.0)
    assert (found.num_trials, found.trial_s, found.left_s, found.search_s) == (4, 8.0, None, None)
    assert outlook(Budget(clock=VirtualClock(), total_s=None), baseline, seconds, warm_spares_s=0.0).num_trials is None


def test_plan_before_the_first_trial_uses_the_time_of_the_baseline():
    budget = Budget(clock=VirtualClock(), total_s=100.0)
    found = outlook(budget, trial(12.0, number=0, kind=Kind.baseline), [], warm_spares_s=2.0)
    assert (found.num_trials, found.trial_s) == (10, 10.0)


@pytest.mark.parametrize(
    ("speedup", "is_kept", "repaid_s", "interval_s", "why_not"),
    [
        (FASTER, False, 1000.0, [750.0, 1500.0], ""),
        ({**FASTER, "ci": [1.0, 3.0]}, False, 1000.0, [750.0, None], ""),
        (None, True, None, None, "never"),
        ({**FASTER, "ratio": 0.98}, False, None, None, "never"),
        ({**FASTER, "ci": None}, False, None, None, "not known"),
        (UNDECIDED, True, None, None, "not known: the measurements do not show"),
        ({**UNDECIDED, "verdict": "same"}, True, None, None, "never: nothing faster"),
        ({**UNDECIDED, "overrides": {}}, True, None, None, "never: nothing faster"),
    ],
)
def test_search_is_repaid_once_a_training_has_saved_the_time_of_the_search(speedup, is_kept, repaid_s, interval_s, why_not):
    found = search_cost([trial(1.0)], seconds=480.0, speedup=speedup, is_kept=is_kept, dearer_s=20.0, objective="throughput")
    assert found["repaid_after_s"] == repaid_s
    assert found["ci"] == interval_s
    assert found["why_not"].startswith(why_not)
    assert bool(found["why_not"]) is (repaid_s is None)


def test_payback_excludes_the_start_for_time_for_samples_and_is_undefined_for_energy():
    found = search_cost([], seconds=480.0, speedup=FASTER, is_kept=False, dearer_s=20.0, objective="time_for_samples")
    assert found["repaid_after_s"] == 960.0
    assert search_cost([], seconds=480.0, speedup=FASTER, is_kept=False, dearer_s=0.0, objective="energy_per_sample")["why_not"]


def test_search_that_finds_nothing_faster_is_never_repaid(bench, tiny):
    slow = {("precision.amp", "bf16"): 0.5, ("loader.num_workers", 2): 0.5}
    cost = bench(Surface(gains=slow), *tiny).run()["search_cost"]
    assert (cost["repaid_after_s"], cost["why_not"]) == (None, "never: nothing faster was found")
