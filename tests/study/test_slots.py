"""Studies whose trials run in parallel, on the fake launcher."""

import collections
import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest

from autotune.clock import VirtualClock
from autotune.errors import NoNode
from autotune.records import AGAIN, Kind, Outcome
from autotune.search.rates import RatesSampler
from autotune.study import resume_study
from autotune.study.interference import MAX_PAIRS, MIN_PAIRS, SAMPLE_SLOTS, Interference, _slowest_machines, calibration
from autotune.trials.places import Place
from autotune.trials.schedule import Schedule
from tests.study.conftest import RATES, Bench
from tests.support.fake_launcher import Failure, FakeLauncher, Surface

FEW, ENOUGH = (["search.sampler=random", f"study.budget.trials={num}"] for num in (14, 24))
# Gains too small to make the study calibrate again.
GAINS = {("precision.amp", "bf16"): 1.2, ("layout.channels_last", True): 1.1, ("loader.num_workers", 2): 1.05}
QUIET = {"gains": GAINS, "noise_frac": 0.003, "half_batch": 0.1, "loader_per_s": 1e4}
LOUD = {**QUIET, "beside": lambda at_once: 1.0 if at_once == 1 else 0.7}


def notices(study):
    return study.listener.named("notice")


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


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A finished study on four slots that do not disturb each other. Some of its configurations run out of memory."""
    surface = Surface(**QUIET, max_batch=64)
    study = Bench(
        tmp_path_factory.mktemp("quiet"), surface, "search.sampler=random", "study.budget.trials=24", minutes=60, num_slots=4
    )
    study.summary = study.run()
    return study


def test_with_quiet_neighbours_search_trials_run_in_parallel(quiet):
    searched = of_kind(quiet, Kind.search)
    assert quiet.summary["status"] == "complete"
    assert most_at_once(searched) == 4
    assert {trial.slot for trial in searched} == {"1", "2", "3", "4"}
    assert max(trial.neighbours for trial in searched) == 3
    assert any("4 trials at a time: in parallel with 3 others" in line for line in notices(quiet))
    assert quiet.summary["speedup"]["verdict"] == "faster"


def test_four_slots_give_more_than_three_times_the_trials_per_hour(quiet):
    all_searched = of_kind(quiet, Kind.search)
    searched = spans(all_searched[: [trial.origin for trial in all_searched].index("late")])
    took_s = max(end for _, end, _ in searched) - min(begin for begin, _, _ in searched)
    assert sum(trial.seconds for _, _, trial in searched) / took_s > 3


def test_failed_trial_does_not_affect_its_neighbours(quiet):
    outcomes = collections.Counter(trial.outcome for trial in of_kind(quiet, Kind.search))
    assert sum(count for outcome, count in outcomes.items() if outcome.is_memory) > 0
    assert outcomes[Outcome.ok] + outcomes[Outcome.raced] > 8


def test_all_trials_except_search_trials_run_alone(quiet):
    alone = of_kind(quiet, Kind.baseline, Kind.final, Kind.attribution, Kind.parity)
    assert len(alone) > 6
    for begin, end, trial in spans(alone):
        others = [other for b, e, other in spans(quiet.trials) if other is not trial and b < end - 1e-6 and e > begin + 1e-6]
        assert [other.number for other in others if other.number != trial.number] == []
        assert (trial.slot, trial.neighbours) == ("", 0)


def test_calibration_alternates_between_one_trial_and_parallel_trials(quiet):
    rounds = collections.defaultdict(list)
    for trial in calibrating(quiet):
        assert (trial.kind, trial.repeats) == (Kind.check, 0)
        rounds[trial.round].append(trial.slot)
    assert MIN_PAIRS <= len(rounds) <= MAX_PAIRS
    assert rounds[1] == ["", "1", "2", "3", "4"]
    assert rounds[2] == ["1", "2", "3", "4", ""]


def by_round(study):
    rounds = collections.defaultdict(list)
    for trial in calibrating(study):
        rounds[trial.round].append(trial)
    return rounds


@pytest.mark.thorough
def test_first_calibration_pair_uses_all_slots_and_later_pairs_two_machines(bench):
    budget = ["search.sampler=random", "study.budget.trials=34"]
    study = bench(Surface(**QUIET), *budget, minutes=60, num_slots=32, slots_per_host=8)
    study.run()
    first, *others = by_round(study).values()
    assert len(first) == 1 + 32
    assert len(others) >= MIN_PAIRS - 1
    for trials in others:
        assert collections.Counter(trial.host for trial in trials if trial.slot).most_common(1)[0][1] == 8
        assert len(trials) == 1 + SAMPLE_SLOTS
    words = "pairs; all but the first ran on only 16 slots)"
    assert any("32 trials at a time" in line and words in line for line in notices(study))
    assert study.folder.read_study().slots["num_sampled"] == SAMPLE_SLOTS


@pytest.mark.thorough
def test_a_study_uses_no_more_slots_than_its_budget_has_trials(bench):
    study = bench(Surface(**QUIET), *FEW, minutes=60, num_slots=32, slots_per_host=8)
    study.run()
    assert len(by_round(study)[1]) == 1 + 14
    assert study.folder.read_study().slots["num"] == 14


def test_the_machines_with_the_slowest_slots_are_measured_again():
    places = [SimpleNamespace(number=str(n), host=f"node{n // 8}") for n in range(64)]
    rates = {**{place.number: 100.0 for place in places}, "20": 90.0, "63": 95.0}
    assert {place.host for place in _slowest_machines(places, rates)} == {"node2", "node7"}
    assert len(_slowest_machines(places[:8], rates)) == 8


def test_slowdown_common_to_all_machines_is_detected_in_the_first_pair():
    def pairs(first):
        return [(100.0, {str(n): 100.0 * first for n in range(64)}), *[(100.0, {str(n): 100.0 for n in range(16)})] * 7]

    assert calibration(pairs(0.99)).is_allowed
    assert not calibration(pairs(0.94)).is_allowed


def test_no_configuration_is_measured_twice_in_a_search(quiet):
    changes = [frozenset(trial.changed.items()) for trial in of_kind(quiet, Kind.search)]
    assert len(changes) == len(set(changes)) == 24


def test_neighbours_that_disturb_are_refused_with_the_measured_ratio(bench):
    study = bench(Surface(**LOUD), "search.sampler=random", "study.budget.trials=24", minutes=60, num_slots=2)
    assert study.run()["status"] == "complete"
    said = [
        line for line in notices(study) if line.startswith("One trial at a time: in parallel with 1 other, a trial ran at 0.")
    ]
    assert len(said) == 1
    assert "2 pairs)" in said[0]
    assert most_at_once(of_kind(study, Kind.search)) == 1
    assert {trial.slot for trial in of_kind(study, Kind.search)} == {""}
    assert study.folder.read_study().slots["num"] == 1
    assert study.folder.read_study().slots["ratio"] == pytest.approx(0.7, abs=0.02)


@pytest.mark.thorough
def test_calibration_may_use_a_baseline_that_violates_a_constraint(bench):
    made = Surface(**QUIET, step_s=lambda knobs: 0.3 if knobs["precision.amp"] == "off" else 0.1)
    study = bench(made, *ENOUGH, "constraints.max_step_p95_s=0.2", minutes=60, num_slots=2)
    study.run()
    assert {trial.outcome for trial in calibrating(study) if not trial.changed} == {Outcome.infeasible}
    assert any("2 trials at a time" in line for line in notices(study))


@pytest.mark.thorough
def test_calibration_with_mostly_failed_trials_does_not_blame_neighbours(bench):
    crash = Failure(signal="SIGSEGV", cause="exit")
    made = Surface(**QUIET, failures=lambda number, knobs: crash if 4 <= number <= 9 else None)  # the second and third pair
    study = bench(made, *ENOUGH, minutes=60, num_slots=2)
    study.run()
    assert len(calibrating(study)) == 9
    assert "One trial at a time: the configuration of trial 0 could not be measured in parallel." in notices(study)


def test_with_one_slot_there_is_no_calibration_and_no_notice(bench):
    study = bench(Surface(**QUIET), *FEW, minutes=8)
    study.run()
    assert calibrating(study) == []
    assert not any("at a time" in line for line in notices(study))
    assert study.folder.read_study().slots == {}


def test_a_budget_too_small_for_a_calibration_means_one_slot(bench):
    study = bench(Surface(**QUIET), *FEW, minutes=3, num_slots=2)
    study.run()
    assert calibrating(study) == []
    told = (
        r"One trial at a time: testing whether parallel trials disturb each other takes \S+ .*, too long for a search of about "
    )
    assert any(re.match(told, line) for line in notices(study))


def test_calibration_that_finds_no_answer_leaves_the_finals_their_time(bench):
    study = bench(Surface(**{**QUIET, "noise_frac": 0.1}), "search.sampler=random", minutes=4.2, num_slots=16)
    study.run()
    assert MIN_PAIRS <= len(by_round(study)) < MAX_PAIRS
    assert any(line.startswith("One trial at a time: in parallel with ") for line in notices(study))
    assert study.folder.read_study().slots["hosts"] == [], "a resumed study has to calibrate again"


def test_a_program_that_writes_into_its_folder_gets_one_slot(bench):
    study = bench(Surface(**QUIET, files_left={"last.pt": 10}), *FEW, minutes=60, num_slots=2)
    study.run()
    assert any("One trial at a time: the program writes last.pt" in line for line in notices(study))
    assert most_at_once(study.trials) == 1


def test_interrupt_records_all_running_trials_and_resume_repeats_them(bench):
    def failures(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if trial == 26 else None

    study = bench(Surface(**QUIET, failures=failures), *FEW, minutes=60, num_slots=4)
    assert study.run()["status"] == "interrupted"
    before = {trial.number: trial for trial in study.trials}
    stopped = [trial for trial in before.values() if trial.outcome is Outcome.interrupted]
    assert 2 <= len(stopped) <= 4
    assert not study.launcher.running
    assert set(before) == set(range(len(before)))
    study.surface.failures = lambda trial, knobs: None
    assert resume_study(study.inputs, study.folder, study.listener)["status"] == "complete"
    again = [trial.changed for trial in study.trials if trial.why.startswith("again: trial")]
    assert sorted(map(str, again)) == sorted(str(trial.changed) for trial in stopped if trial.kind is Kind.search)
    assert all(trial == before[trial.number] for trial in study.trials if trial.number in before)


@pytest.mark.thorough
def test_a_study_that_is_resumed_in_the_finals_keeps_its_calibration(bench):
    study = bench(Surface(**QUIET), *FEW, minutes=60, num_slots=4)
    study.surface.failures = lambda trial, knobs: (
        Failure(raises=KeyboardInterrupt) if of_kind(study, Kind.final) and trial == len(study.trials) else None
    )
    assert study.run()["status"] == "interrupted"
    before = study.folder.read_study().slots
    assert (before["num"], len(of_kind(study, Kind.final)) > 0) == (4, True)
    study.surface.failures = lambda trial, knobs: None
    said = len(notices(study))
    assert resume_study(study.inputs, study.folder, study.listener)["status"] == "complete"
    assert study.folder.read_study().slots == before
    assert not any("at a time" in line for line in notices(study)[said:])


def interrupted_in_the_search(study, after):
    """Runs a study until it is interrupted in its parallel search, `after` trials after the last calibration."""

    def failures(trial, knobs):
        is_due = calibrating(study) and trial == calibrating(study)[-1].number + after
        return Failure(raises=KeyboardInterrupt) if is_due else None

    study.surface.failures = failures
    assert study.run()["status"] == "interrupted"
    assert not of_kind(study, Kind.final)
    study.surface.failures = lambda trial, knobs: None
    return len(calibrating(study)), len(study.trials), len(notices(study))


@pytest.mark.thorough
def test_a_study_resumed_in_the_search_keeps_a_calibration_of_the_same_machines(bench):
    study = bench(Surface(**QUIET), *ENOUGH, minutes=60, num_slots=4, slots_per_host=2)
    num, before, said = interrupted_in_the_search(study, after=8)
    assert resume_study(study.inputs, study.folder, study.listener)["status"] == "complete"
    assert len(calibrating(study)) == num
    assert most_at_once([trial for trial in of_kind(study, Kind.search) if trial.number >= before]) == 4
    (line,) = [line for line in notices(study)[said:] if "at a time" in line]
    assert re.match(r"4 trials at a time, as before: in parallel with the others, a trial ran at (0\.9|1\.0)", line)


@pytest.mark.thorough
def test_a_study_resumed_on_other_machines_is_calibrated_again(bench):
    study = bench(Surface(**QUIET), *ENOUGH, minutes=60, num_slots=4, slots_per_host=2)
    num, _, _ = interrupted_in_the_search(study, after=8)
    for slot in study.launcher.beside()[2:]:
        slot.slot = dataclasses.replace(slot.slot, host="another")
    assert resume_study(study.inputs, study.folder, study.listener)["status"] == "complete"
    assert len(calibrating(study)) >= num + 5 * MIN_PAIRS


@pytest.mark.thorough
def test_a_resumed_study_whose_neighbours_disturb_goes_on_alone_without_a_new_calibration(bench):
    study = bench(Surface(**LOUD), *ENOUGH, minutes=60, num_slots=4)
    num, _, said = interrupted_in_the_search(study, after=8)
    assert resume_study(study.inputs, study.folder, study.listener)["status"] == "complete"
    assert len(calibrating(study)) == num
    assert any(line.startswith("One trial at a time: in parallel with 3 others") for line in notices(study)[said:])


@pytest.mark.thorough
def test_slots_are_calibrated_again_once_a_lost_slot_is_on_another_machine(bench):
    study = bench(Surface(**QUIET, on_slot=lambda slot: 0.7 if "new" in slot else 1.0), *ENOUGH, minutes=60, num_slots=4)
    slot = study.launcher.beside()[3]

    def no_node(_):
        if len(of_kind(study, Kind.search)) > 2:
            slot.slot = dataclasses.replace(slot.slot, name="4: new, job 22", host="new")
        return ""

    is_left_out = lambda: any(line.startswith("Slot 4 is left out: a trial there ran at 0.") for line in notices(study))  # noqa: E731
    study.surface.no_node = no_node
    study.surface.failures = lambda trial, knobs: (
        Failure(raises=KeyboardInterrupt) if is_left_out() and of_kind(study, Kind.search)[5:] else None
    )
    study.run()
    assert is_left_out()
    assert {trial.round for trial in calibrating(study)} > set(range(1, 2 * MIN_PAIRS))


@pytest.mark.thorough
def test_calibration_is_repeated_with_a_configuration_that_is_much_faster(bench):
    surface = Surface(**{**QUIET, "gains": {("precision.amp", "bf16"): 1.8}})
    study = bench(surface, "search.sampler=random", "study.budget.trials=40", minutes=60, num_slots=4)
    study.run()
    of = collections.Counter(trial.repeats for trial in calibrating(study))
    fast = [trial for trial in study.trials if trial.number in of and trial.number]
    assert of[0] >= 5 * MIN_PAIRS
    assert [trial.changed["precision.amp"] for trial in fast] == ["bf16"]


@pytest.mark.thorough
def test_budget_in_trials_includes_running_trials(bench):
    study = bench(Surface(**QUIET), "search.sampler=random", "study.budget.trials=23", minutes=60, num_slots=4)
    study.run()
    assert len(of_kind(study, Kind.search)) == 23


@pytest.mark.parametrize(
    ("beside", "is_allowed"),
    [
        ([0.99, 1.0, 1.01, 1.0], True),
        ([0.95, 0.96, 0.95, 0.96], False),
        ([0.9, 1.1, 0.9, 1.1], False),
        ([1.0, 1.0], False),
        ([1.5] * 5, False),
    ],
)
def test_neighbours_are_allowed_only_if_the_interval_is_within_the_margin(beside, is_allowed):
    found = calibration([(100.0, {"1": 100 * ratio, "2": 100 * ratio}) for ratio in beside])
    assert found.is_allowed is is_allowed


def test_a_machine_that_is_never_quiet_does_not_allow_any_neighbour():
    alone = [100.0, 150.0, 90.0, 160.0, 100.0, 150.0, 90.0, 160.0]
    found = calibration([(rate, {"1": 0.9 * rate, "2": 0.9 * rate}) for rate in alone])
    assert found.margin == 0.05
    assert not found.is_allowed


def test_a_single_slow_slot_is_not_hidden_by_the_others():
    found = calibration([(100.0, {**{str(n): 100.5 for n in range(7)}, "8": 92.0})] * 8)
    assert found.slowest == ("8", pytest.approx(0.92))
    assert not found.is_allowed


def test_summary_is_written_at_most_every_five_seconds_and_is_complete_at_the_end(bench):
    study = bench(Surface(**{**QUIET, "start_s": 0.3, "window_s": 0.3}), *FEW, minutes=8, is_kept=True)
    written = []
    write = study.folder.write_summary
    study.folder.write_summary = lambda summary: (written.append((study.clock.now_s, summary)), write(summary))
    summary = study.run()
    while_searching = [now_s for now_s, one in written if one["status"] == "running" and len(one["trials"]) > 1]
    assert len(while_searching) > 1
    assert len(while_searching) < len(study.trials) / 2
    assert all(later - earlier >= 4.9 for earlier, later in itertools.pairwise(while_searching))
    assert len(summary["trials"]) == len(study.trials) == len(study.folder.read_summary()["trials"])


@pytest.mark.thorough
def test_summary_of_many_trials_is_written_when_their_number_grew_by_two_percent(bench):
    limits = ("search.stop=false", "study.budget.trials=260")
    study = bench(Surface(**QUIET), "search.sampler=random", *limits, minutes=10_000, is_kept=True)
    written = []
    write = study.folder.write_summary
    study.folder.write_summary = lambda summary: (written.append((study.clock.now_s, len(summary["trials"]))), write(summary))
    study.run()
    before = [num for _, num in written if num <= 60]
    after = [num for _, num in written if 205 < num < 255]
    assert len(before) > 45
    assert len(after) > 5
    assert all(later - earlier >= 4 for earlier, later in itertools.pairwise(after))


def test_next_trial_number_is_counted_in_memory(bench):
    study = bench(Surface(**QUIET), *FEW, minutes=8)
    study.run()
    num = len(study.trials)
    assert study.folder.next_number() == num
    (study.folder.path / "trials" / "9999").mkdir()
    assert study.folder.next_number() == num  # the folder is listed only at the start
    assert type(study.folder)(study.folder.path).next_number() == 10000


@pytest.mark.thorough
def test_doubted_configuration_is_repeated_in_only_one_slot(bench, tiny, monkeypatch):
    doubted = {"loader.num_workers": 2, "precision.amp": "bf16"}
    monkeypatch.setattr(RatesSampler, "doubted", lambda *_: doubted)
    study = bench(Surface(**QUIET), *tiny, RATES, "search.stop=false", minutes=60, num_slots=4)
    study.run()
    assert [trial.changed for trial in study.trials if trial.origin == AGAIN] == [doubted]


def test_first_trials_run_alone_and_slots_are_calibrated_once_with_the_best_of_them(bench):
    surface = Surface(**{**QUIET, "gains": {("precision.amp", "bf16"): 1.8}})
    study = bench(surface, RATES, "study.budget.trials=30", minutes=60, num_slots=4)
    study.run()
    first, later = of_kind(study, Kind.search)[:3], of_kind(study, Kind.search)[3:]
    best = max(first, key=lambda trial: trial.value or 0.0)
    assert {trial.repeats for trial in calibrating(study)} == {best.number}
    assert {(trial.slot, trial.neighbours) for trial in first} == {("", 0)}
    assert most_at_once(later) == 4


@pytest.mark.thorough
def test_resumed_study_is_calibrated_with_the_best_trial_so_far(bench):
    surface = Surface(**{**QUIET, "gains": {("precision.amp", "bf16"): 1.8}})
    surface.failures = lambda trial, knobs: Failure(raises=KeyboardInterrupt) if trial == 4 else None
    study = bench(surface, RATES, "study.budget.trials=30", minutes=60, num_slots=4)
    assert study.run()["status"] == "interrupted"
    assert calibrating(study)[0].outcome is Outcome.interrupted
    surface.failures = lambda trial, knobs: None
    resume_study(study.inputs, study.folder, study.listener)
    assert {trial.changed.get("precision.amp") for trial in calibrating(study)} == {"bf16"}


@pytest.mark.parametrize("factor", [0.9, 0.3])
def test_slow_slot_is_left_out_and_the_others_run_in_parallel(bench, factor):
    surface = Surface(**QUIET, on_slot=lambda slot: factor if slot == "3" else 1.0)
    study = bench(surface, *ENOUGH, minutes=60, num_slots=8)
    study.run()
    (left_out,) = [line for line in notices(study) if "left out" in line]
    (ratio,) = re.findall(r"^Slot 3 is left out: a trial there ran at (\S+) of its rate alone, unlike", left_out)
    assert float(ratio) == pytest.approx(factor, abs=0.02)
    assert any(line.startswith("7 trials at a time: in parallel with 7 others, a trial ran at ") for line in notices(study))
    searched = of_kind(study, Kind.search)
    assert most_at_once(searched) == 7
    assert "3" not in {trial.slot for trial in searched}
    assert study.folder.read_study().slots["num"] == 7


@pytest.mark.thorough
def test_two_slow_machines_of_many_are_left_out(bench):
    surface = Surface(**QUIET, on_slot=lambda slot: 0.8 if slot and int(slot) > 48 else 1.0)
    study = bench(surface, "search.sampler=random", "study.budget.trials=80", minutes=60, num_slots=64, slots_per_host=8)
    study.run()
    assert sum("is left out: a trial there ran at " in line for line in notices(study)) == 16
    assert any(line.startswith("48 trials at a time: in parallel with 63 others") for line in notices(study))
    assert {trial.host for trial in of_kind(study, Kind.search)}.isdisjoint({"fake6", "fake7"})


@pytest.mark.thorough
def test_slot_on_which_all_trials_fail_is_left_out(bench):
    surface = Surface(**QUIET, on_slot=lambda slot: 0.0 if slot == "8" else 1.0)
    study = bench(surface, *ENOUGH, minutes=60, num_slots=8)
    study.run()
    assert "Slot 8 is left out: all of its trials failed, unlike on the other slots." in notices(study)
    assert any(line.startswith("7 trials at a time: in parallel with 6 others") for line in notices(study))
    assert most_at_once(of_kind(study, Kind.search)) == 7


@pytest.mark.thorough
def test_slots_are_not_left_out_if_many_of_them_are_slow(bench):
    surface = Surface(**QUIET, on_slot=lambda slot: 0.9 if slot in ("2", "3", "4") else 1.0)
    study = bench(surface, *ENOUGH, minutes=60, num_slots=8)
    study.run()
    assert not any("left out" in line for line in notices(study))
    assert any(line.startswith("One trial at a time: in parallel with 7 others") for line in notices(study))


# How a slot is lost: it waits for a node, or will never get one.
WAITS, NEVER = "Resources (job 12)", NoNode("launch.queue_minutes: Slurm provided no node within 60 min")


class Losing:
    """Loses slots once a study has a number of trials. Time stands still while all trials that are left wait for nodes."""

    def __init__(self, study, lost, after):
        self._study, self._lost, self._after = study, lost, after
        study.surface.no_node = self

    def __call__(self, slot):
        return self._lost.get(slot, "") if len(self._study.launcher.launches) > self._after else ""


@pytest.mark.thorough
def test_trial_that_waits_for_a_node_moves_to_a_free_slot_before_the_finals(bench):
    study = bench(Surface(**QUIET), *ENOUGH, minutes=60, num_slots=4)
    Losing(study, {"3": WAITS}, after=28)
    assert study.run()["status"] == "complete"
    searched = of_kind(study, Kind.search)
    assert "Waiting for a node: Resources (job 12)." in notices(study)
    assert len(searched) == 24
    assert all(trial.outcome.has_value for trial in searched)
    assert {trial.slot for trial in searched[-8:]} == {"1", "2", "4"}
    assert most_at_once(searched) == 4


@pytest.mark.parametrize("after", [8, 28], ids=["in the calibration", "in the search"])
def test_study_goes_on_without_a_slot_that_gets_no_node(bench, after):
    study = bench(Surface(**QUIET), *ENOUGH, minutes=60, num_slots=4)
    Losing(study, {"3": NEVER}, after=after)
    assert study.run()["status"] == "complete"
    assert f"The study goes on without slot 3: {NEVER}" in notices(study)
    cut_off = [trial for trial in study.trials if trial.outcome is Outcome.interrupted]
    assert {trial.kind for trial in cut_off} <= {Kind.check}, "a search trial moves to another slot"
    assert {(trial.slot, trial.reason) for trial in cut_off} == ({("3", str(NEVER))} if after == 8 else set())
    last = of_kind(study, Kind.search)[-6:]
    assert {trial.slot for trial in last} == {"1", "2", "4"}
    assert max(trial.neighbours for trial in last) == 2


@pytest.mark.parametrize("others", ["busy", "free"])
def test_search_trial_whose_slot_gets_no_node_runs_on_another_slot(bench, others):
    study = bench(Surface(**QUIET), *ENOUGH, minutes=60, num_slots=4)
    lost = {"3": NEVER} if others == "busy" else {"3": NEVER, "4": WAITS}
    Losing(study, lost, after=28)
    assert study.run()["status"] == "complete"
    searched = of_kind(study, Kind.search)
    assert [trial.number for trial in study.trials] == list(range(len(study.trials))), "each trial is recorded once"
    assert len(searched) == 24
    assert all(trial.outcome.has_value for trial in searched)


def test_search_trial_without_a_slot_is_ended_when_its_time_is_up():
    clock, runner = VirtualClock(), SimpleNamespace(alone="whole", beside=["slot 1"])
    request = SimpleNamespace(kind=Kind.search, ends_s=clock.now_s + 5.0)
    trial = SimpleNamespace(place="slot 2", request=request, is_waiting=False, look=lambda: "ended")
    busy = SimpleNamespace(place="slot 1")
    schedule = Schedule(runner, lambda _: None, lambda: None, clock=clock, poll_s=0.1)
    schedule._running = [trial, busy]
    assert schedule._looked(trial) is None
    clock.sleep(5.0)
    assert schedule._looked(trial) == "ended"


def test_waiting_trial_takes_no_slot_whose_device_may_be_tested_next():
    """The last trial there may have failed because of the device, which is tested once that trial is passed on."""
    launcher, moved = SimpleNamespace(why_waiting=lambda: ""), []
    places = [Place(SimpleNamespace(slot=SimpleNamespace(name=name), **vars(launcher)), None) for name in "12"]
    runner = SimpleNamespace(alone="whole", beside=places)
    request = SimpleNamespace(kind=Kind.search, ends_s=None)
    trial = SimpleNamespace(place=places[0], request=request, is_waiting=True, look=lambda: None, move=moved.append)
    schedule = Schedule(runner, lambda _: None, lambda: None, clock=VirtualClock(), poll_s=0.1)
    schedule._running = [trial]
    schedule._looked(trial, [(SimpleNamespace(record=SimpleNamespace(slot="2")), print)])
    assert moved == []
    schedule._looked(trial)
    assert moved == [places[1]]


def test_study_ends_if_the_slot_of_trials_that_run_alone_gets_no_node(bench):
    study = bench(Surface(**QUIET), *ENOUGH, minutes=60, num_slots=4)
    Losing(study, {"1": NEVER}, after=28)
    with pytest.raises(NoNode):
        study.run()


def test_trials_run_alone_once_only_one_slot_is_left(bench):
    study = bench(Surface(**QUIET), *ENOUGH, minutes=60, num_slots=2)
    Losing(study, {"2": NEVER}, after=30)
    assert study.run()["status"] == "complete"
    assert "One trial at a time: no other slot is left." in notices(study)
    assert {trial.slot for trial in of_kind(study, Kind.search)[-3:]} == {""}


@pytest.mark.thorough
def test_calibration_goes_on_after_single_pairs_in_which_a_trial_failed(bench):
    crash = Failure(signal="SIGSEGV", cause="exit")
    surface = Surface(**QUIET, failures=lambda number, knobs: crash if number in (2, 3, 11, 12) else None)
    study = bench(surface, *ENOUGH, minutes=60, num_slots=2)
    study.run()
    assert any("2 trials at a time" in line for line in notices(study))


@pytest.mark.thorough
def test_slot_that_worked_on_its_new_node_is_not_taken_for_one_on_which_all_fail(bench):
    crash = Failure(signal="SIGSEGV", cause="exit")
    surface = Surface(**QUIET, failures=lambda number, knobs: crash if number in (17, 27) else None)
    study = bench(surface, *ENOUGH, minutes=60, num_slots=8)
    slot = study.launcher.beside()[7]

    def no_node(_):
        if study.launcher.launches[1:]:
            slot.slot = dataclasses.replace(slot.slot, name="8: n1, job 22")
        return ""

    surface.no_node = no_node
    study.run()
    assert {trial.slot for trial in study.trials if trial.number in (17, 27)} == {"8: n1, job 22"}
    assert not any("left out" in line for line in notices(study))


def test_resumed_search_with_nothing_left_to_try_is_not_calibrated(bench, tiny):
    study = bench(Surface(**QUIET), *tiny, minutes=60, num_slots=2)
    study.surface.failures = lambda trial, knobs: (
        Failure(raises=KeyboardInterrupt) if of_kind(study, Kind.final) and trial == len(study.trials) else None
    )
    assert study.run()["status"] == "interrupted"
    before = len(calibrating(study))
    study.surface.failures = lambda trial, knobs: None
    assert resume_study(study.inputs, study.folder, study.listener)["status"] == "complete"
    assert len(calibrating(study)) == before


def test_other_slots_are_released_when_the_search_is_over(bench, monkeypatch):
    released = []
    monkeypatch.setattr(FakeLauncher, "release", lambda self: released.append(len(self.launches)))
    study = bench(Surface(**QUIET), *FEW, minutes=60, num_slots=4)
    study.run()
    (num_before,) = released
    kinds = {trial.kind for trial in study.trials[num_before:]}
    assert Kind.final in kinds
    assert kinds <= {Kind.final, Kind.attribution, Kind.parity}


RANKS = {"world_size": 2}
STANDALONE = ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]


@pytest.mark.parametrize(
    ("command", "hosts", "may_meet"),
    [
        (["torchrun", "--nproc_per_node=2", "train.py"], ["a", "a"], True),
        (["torchrun", "--nproc_per_node=2", "train.py", "--standalone"], ["a", "a"], True),
        (["python", "train.py"], ["a", "b", "a"], True),
        (["torchrun", "--nproc_per_node=2", "train.py"], ["a", "b"], False),
        (STANDALONE, ["a", "a"], False),
        (["python", "-m", "torch.distributed.run", *STANDALONE[1:]], ["a", "a"], False),
    ],
)
def test_several_processes_use_one_slot_only_if_those_of_two_trials_could_meet(command, hosts, may_meet):
    session = SimpleNamespace(
        baseline=SimpleNamespace(evidence={}, ranks=RANKS),
        runner=SimpleNamespace(beside=[SimpleNamespace(host=host) for host in hosts]),
        inputs=SimpleNamespace(command=SimpleNamespace(argv=lambda knobs: command)),
    )
    why = Interference(session)._why_never
    assert ("several processes" in why) is may_meet


@pytest.mark.thorough
def test_first_trials_run_few_at_a_time_so_that_later_ones_can_learn_from_them(bench):
    surface = Surface(**QUIET)
    study = bench(surface, RATES, "study.budget.trials=30", minutes=60, num_slots=16)
    study.run()
    found = of_kind(study, Kind.search)
    for trial in found:
        others = [one for one in found if one.started_at <= trial.started_at < one.started_at + one.seconds - 1e-6]
        num_over = sum(one.started_at + one.seconds <= trial.started_at + 1e-6 for one in found)
        assert len(others) <= max(4, num_over)
    assert most_at_once(found) > 4
    (line,) = [line for line in notices(study) if "at once" in line]
    assert line.startswith("At first, 4 trials run at once")
