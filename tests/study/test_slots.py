"""Studies whose trials run beside each other, on the fake launcher."""

import collections

import pytest

from autotune.records import Kind, Outcome
from autotune.study import resume_study
from autotune.study.interference import MAX_PAIRS, MIN_PAIRS, calibration
from autotune.testing.fake_launcher import OUT_OF_MEMORY, Failure, Surface

GAINS = {("precision.amp", "bf16"): 1.6, ("layout.channels_last", True): 1.2, ("loader.num_workers", 2): 1.1}
QUIET = {"gains": GAINS, "noise_frac": 0.003}
LOUD = {"gains": GAINS, "noise_frac": 0.003, "beside": lambda at_once: 1.0 if at_once == 1 else 0.7}


def of_kind(study, *kinds):
    return [trial for trial in study.trials if trial.kind in kinds]


def calibrating(study):
    return [trial for trial in study.trials if trial.origin == "neighbours"]


def spans(trials):
    return [(trial.started_at, trial.started_at + trial.seconds, trial) for trial in trials]


def most_at_once(trials):
    moments = sorted([(begin, 1) for begin, _, _ in spans(trials)] + [(end - 1e-6, -1) for _, end, _ in spans(trials)])
    now = most = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def test_with_quiet_neighbours_search_trials_run_beside_each_other(bench):
    study = bench(Surface(**QUIET), minutes=20, num_slots=4)
    summary = study.run()
    assert summary["status"] == "complete"
    searched = of_kind(study, Kind.search)
    assert most_at_once(searched) == 4
    assert {trial.slot for trial in searched} == {"1", "2", "3", "4"}
    assert max(trial.neighbours for trial in searched) == 3
    assert any("4 trials at a time: beside 3 others" in line for line in study.listener.notices)
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"


def test_more_trials_fit_into_the_same_budget(bench, tmp_path):
    nums = []
    for num_slots in (1, 4):
        study = bench(Surface(**QUIET), minutes=20, num_slots=num_slots)
        study.run()
        nums.append(len(of_kind(study, Kind.search)))
    assert nums[1] >= 2 * nums[0]


def test_everything_but_the_search_runs_alone(bench):
    study = bench(Surface(**QUIET), minutes=20, num_slots=4)
    study.run()
    alone = of_kind(study, Kind.baseline, Kind.final, Kind.attribution, Kind.parity)
    assert len(alone) > 6
    for begin, end, trial in spans(alone):
        others = [other for b, e, other in spans(study.trials) if other is not trial and b < end - 1e-6 and e > begin + 1e-6]
        assert others == []
        assert (trial.slot, trial.neighbours) == ("", 0)


def test_the_calibration_measures_alone_and_beside_in_turn(bench):
    study = bench(Surface(**QUIET), minutes=20, num_slots=2)
    study.run()
    rounds = collections.defaultdict(list)
    for trial in calibrating(study):
        assert (trial.kind, trial.repeats) == (Kind.check, 0)
        rounds[trial.round].append(trial.slot)
    assert MIN_PAIRS <= len(rounds) <= MAX_PAIRS
    assert rounds[1] == ["", "1", "2"]
    assert rounds[2] == ["1", "2", ""]


def test_loud_neighbours_are_refused_with_the_measured_ratio(bench):
    study = bench(Surface(**LOUD), minutes=20, num_slots=2)
    summary = study.run()
    assert summary["status"] == "complete"
    assert any(line.startswith("One trial at a time: beside 1 other, a trial ran at 0.7") for line in study.listener.notices)
    assert most_at_once(of_kind(study, Kind.search)) == 1
    assert study.folder.read_study().slots["num"] == 1
    assert study.folder.read_study().slots["ratio"] == pytest.approx(0.7, abs=0.02)


def test_with_one_slot_nothing_is_calibrated_and_nothing_is_said(bench):
    study = bench(Surface(**QUIET), minutes=8)
    study.run()
    assert calibrating(study) == []
    assert not any("at a time" in line for line in study.listener.notices)
    assert study.folder.read_study().slots == {}


def test_a_budget_too_small_for_a_calibration_means_one_slot(bench):
    study = bench(Surface(**QUIET), minutes=3, num_slots=2)
    study.run()
    assert calibrating(study) == []
    assert any("One trial at a time: to find out whether neighbours disturb takes" in line for line in study.listener.notices)


def test_a_trial_that_fails_leaves_its_neighbours_alone(bench):
    def failures(trial, knobs):
        return OUT_OF_MEMORY if knobs["loader.batch_size"] > 64 else None

    study = bench(Surface(**QUIET, failures=failures), minutes=20, num_slots=4)
    summary = study.run()
    outcomes = collections.Counter(trial.outcome for trial in of_kind(study, Kind.search))
    assert outcomes[Outcome.oom] > 0
    assert outcomes[Outcome.ok] > outcomes[Outcome.oom]
    assert summary["speedup"]["verdict"] == "faster"


def test_an_interrupt_ends_and_records_all_that_runs(bench):
    def failures(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if trial == 30 else None

    study = bench(Surface(**QUIET, failures=failures), minutes=20, num_slots=4)
    summary = study.run()
    assert summary["status"] == "interrupted"
    stopped = [trial for trial in study.trials if trial.outcome is Outcome.interrupted]
    assert 2 <= len(stopped) <= 4
    assert not study.launcher.running
    assert {trial.number for trial in study.trials} == set(range(len(study.trials)))


def test_an_interrupted_study_goes_on_with_what_was_cut_off(bench):
    def failures(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if trial == 30 else None

    study = bench(Surface(**QUIET, failures=failures), minutes=20, num_slots=4)
    study.run()
    before = {trial.number: trial for trial in study.trials}
    study.surface.failures = lambda trial, knobs: None
    summary = resume_study(study.inputs, study.folder, study.listener)
    assert summary["status"] == "complete"
    again = [trial for trial in study.trials if trial.why.startswith("again: trial")]
    stopped = [trial for trial in before.values() if trial.outcome is Outcome.interrupted and trial.kind is Kind.search]
    assert [trial.changed for trial in again] == [trial.changed for trial in stopped]
    assert all(trial == before[trial.number] for trial in study.trials if trial.number in before)


def test_no_configuration_is_measured_twice_in_a_search(bench):
    study = bench(Surface(**QUIET), minutes=20, num_slots=8)
    study.run()
    changes = [frozenset(trial.changed.items()) for trial in of_kind(study, Kind.search)]
    assert len(changes) == len(set(changes))


@pytest.mark.parametrize("limit", [5, 12])
def test_a_budget_in_trials_counts_those_that_run(bench, limit):
    study = bench(Surface(**QUIET), f"study.budget.trials={limit}", minutes=60, num_slots=3)
    study.run()
    assert len(of_kind(study, Kind.search)) == limit


@pytest.mark.parametrize(
    ("beside", "is_allowed"),
    [([0.99, 1.0, 1.01, 1.0], True), ([0.95, 0.96, 0.95, 0.96], False), ([0.9, 1.1, 0.9, 1.1], False), ([1.0, 1.0], False)],
)
def test_neighbours_are_allowed_only_if_the_interval_is_within_the_margin(beside, is_allowed):
    found = calibration([(100.0, {"1": 100 * ratio, "2": 100 * ratio}) for ratio in beside])
    assert found.is_allowed is is_allowed


def test_a_single_slow_slot_is_not_hidden_by_the_others():
    found = calibration([(100.0, {**{str(n): 100.5 for n in range(7)}, "8": 92.0})] * 8)
    assert found.slowest == ("8", pytest.approx(0.92))
    assert not found.is_allowed
