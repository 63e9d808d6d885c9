"""Recordings of a made-up program on a virtual clock, and the tables made from them."""

import dataclasses
import itertools

import pytest

from autotune.cli.record import FIXED, _is_same
from autotune.failures import classify
from autotune.harness.protocol import RankResult, Window
from autotune.ranks import rate_per_s
from autotune.records import Outcome
from autotune.replay.export import _measurement, plain, table_of
from autotune.replay.results import ended_of, facts_of
from autotune.replay.table import key_of
from autotune.run_dir import StudyFolder
from autotune.space import Choice, IntInterval, ResolvedSpace
from autotune.study import resume_study, run_study
from autotune.study.design import configurations
from tests.study.conftest import Bench
from tests.support.fake_launcher import OUT_OF_MEMORY, Failure, Surface
from tests.support.records import a_trial

SPACE = ("search_space=none", "loader.num_workers=choice(0,2)", "precision.amp=choice(off,bf16)")

FIXED_WORDS = tuple(f"{key}={value}" for key, value in FIXED.items())


@pytest.fixture
def recording(tmp_path):
    def make(surface=None, *overrides, **inputs):
        made = Bench(tmp_path / "runs", surface, *SPACE, *FIXED_WORDS, *overrides, is_recording=True, **inputs)
        made.inputs.config.study.budget.minutes = None
        return made

    return make


def places(trials):
    return [(key_of(trial.changed), trial.round or 1) for trial in trials if not trial.outcome.is_no_answer]


def test_each_round_measures_every_configuration_once_in_its_own_order(recording):
    bench = recording(None, "record.repeats=4", is_kept=True)
    summary = bench.run()
    assert (summary["status"], summary["recording"]) == ("complete", {"configurations": 4, "repeats": 4, "trials": 16})
    found = places(bench.trials)
    assert [number for _, number in found] == sorted(number for _, number in found), "round after round"
    assert len(set(found)) == len(found) == 16
    rounds = [tuple(key for key, number in found if number == wanted) for wanted in range(1, 5)]
    assert len(set(rounds)) > 1, "the order differs between rounds"
    assert not bench.folder.best_file.exists(), "a recording has no winner"


@pytest.mark.parametrize(("words", "is_small"), [((), False), (("precision.amp=off",), True)])
def test_recording_that_is_too_small_to_be_replayed_says_so_at_its_start(tmp_path, words, is_small):
    space = [word for word in SPACE if word.partition("=")[0] not in {each.partition("=")[0] for each in words}]
    bench = Bench(tmp_path / "runs", None, *space, *words, *FIXED_WORDS, "record.repeats=1", is_recording=True)
    bench.run()
    said = " ".join(bench.listener.named("notice"))
    assert ("A replay needs at least 4 configurations" in said) is is_small


def test_recording_stops_at_its_time_limit_and_resumes_there(recording):
    bench = recording(None, "record.repeats=3", "record.minutes=1")
    summary = bench.run()
    assert summary["status"] == "interrupted"
    assert "record.minutes=1 leaves no time for another trial: 7 of 12 measurements are missing" in summary["reason"]
    before = places(bench.trials)
    begun_s = bench.clock.now_s
    summary = resume_study(bench.inputs, bench.folder, bench.listener)
    assert bench.clock.now_s - begun_s <= 60, "the limit applies to each run"
    bench.inputs.config.record.minutes = None
    assert resume_study(bench.inputs, bench.folder, bench.listener)["status"] == "complete"
    found = places(bench.trials)
    assert found[: len(before)] == before
    assert len(set(found)) == len(found) == 12


def test_command_that_starts_trials_differently_does_not_continue_a_recording(recording):
    bench = recording(None, "launch.warm=off")
    bench.run()
    about = bench.folder.read_study()
    assert _is_same(about, bench.inputs)
    bench.inputs.config.launch.warm = "auto"
    assert not _is_same(about, bench.inputs)
    del about.recording["warm"]
    bench.inputs.config.launch.warm = "off"
    assert _is_same(about, bench.inputs), "a recording of an earlier version"


def test_best_configurations_get_extra_repeats_after_all_rounds(recording):
    surface = Surface(gains={("precision.amp", "bf16"): 2.0}, loader_per_s=1e6, noise_frac=0.01)
    bench = recording(surface, "record.repeats=2", "record.repeats_of_best=3", "record.minutes=0.7")
    reasons = [bench.run()["reason"]]
    while (summary := resume_study(bench.inputs, bench.folder, bench.listener))["status"] != "complete":
        reasons.append(summary["reason"])
    assert "of 8 measurements are missing" in reasons[0]
    assert any("measurements of the best few are missing" in reason for reason in reasons)
    found = places(bench.trials)
    assert len(set(found)) == len(found) == 2 * 4 + 3 * 2
    assert [number for _, number in found] == sorted(number for _, number in found)
    further = {key for key, number in found if number > 2}
    assert further == {key_of({"precision.amp": "bf16"}), key_of({"precision.amp": "bf16", "loader.num_workers": 2})}


@pytest.mark.parametrize(("num_failures", "is_measured_more"), [(1, True), (2, False)])
def test_configuration_gets_extra_repeats_only_if_most_repeats_succeed(recording, num_failures, is_measured_more):
    best, times = {"precision.amp": "bf16", "loader.num_workers": 2}, itertools.count()

    def fail(trial, knobs):
        return OUT_OF_MEMORY if knobs.items() >= best.items() and next(times) < num_failures else None

    surface = Surface(gains={("precision.amp", "bf16"): 2.0}, loader_per_s=1e6, failures=fail)
    bench = recording(surface, "record.repeats=3", "record.repeats_of_best=2")
    bench.run()
    further = {key for key, number in places(bench.trials) if number > 3}
    assert (key_of(best) in further) is is_measured_more


def test_failures_are_recorded_as_answers_and_a_crash_only_after_a_retry(recording):
    failures = {"bf16": OUT_OF_MEMORY}
    times = itertools.count()

    def fail(trial, knobs):
        if knobs["loader.num_workers"] == 2 and knobs["precision.amp"] == "off":
            return Failure(signal="SIGSEGV", cause="exit") if next(times) < 2 else None
        return failures.get(knobs["precision.amp"])

    bench = recording(Surface(failures=fail), "record.repeats=2")
    assert bench.run()["status"] == "complete"
    found = places(bench.trials)
    assert len(set(found)) == len(found) == 8
    outcomes = {(key_of(trial.changed), trial.round): trial.outcome for trial in bench.trials}
    assert outcomes[key_of({"precision.amp": "bf16"}), 2] is Outcome.device_oom
    assert Outcome.crash in outcomes.values(), "a crash is an answer, too"


def test_table_contains_the_measurements_but_no_host_name_or_path(recording):
    bench = recording(Surface(failures=lambda _, knobs: OUT_OF_MEMORY if knobs["precision.amp"] == "bf16" else None))
    bench.run()
    table = table_of(StudyFolder(bench.folder.path))
    assert table.is_whole
    assert len(table.by_configuration()) == 4
    assert [one.number for one in table.measurements] == [trial.number for trial in bench.trials]
    rates = [trial.value or 0.0 for trial in bench.trials]
    assert [one.value or 0.0 for one in table.measurements] == pytest.approx(rates, rel=1e-5)
    assert [one.outcome for one in table.measurements] == [trial.outcome for trial in bench.trials]
    assert [one.seconds for one in table.measurements] == pytest.approx([trial.seconds for trial in bench.trials], rel=1e-5)
    first = table.measurements[0].results[0]
    assert first["observed"]["loader.batch_size"] == 32
    assert "hostname" not in table.machine
    text = repr(table)
    assert str(bench.folder.path.parent) not in text
    assert "train.py:1" not in text


def test_paths_in_messages_are_reduced_to_their_last_part():
    assert plain("File /home/me/secret/train.py, line 3:\n  no room in ../data/x and ~/y/z.bin") == (
        "File train.py, line 3: no room in x and z.bin"
    )


def space_of(num_knobs):
    keys = ["loader.batch_size", "loader.num_workers", "loader.prefetch_factor", "threads.intra"][:num_knobs]
    reference = {"loader.batch_size": 32, "loader.num_workers": 0, "loader.prefetch_factor": 2, "threads.intra": 4}
    domains = {key: Choice((*range(1, 9), 32)) if key == keys[0] else Choice(tuple(range(9))) for key in keys}
    baseline = {key: value for key, value in reference.items() if key != "loader.prefetch_factor"}
    return ResolvedSpace(domains=domains, pinned={}, baseline=baseline, dropped={}, reference=reference)


def test_small_space_is_recorded_completely_without_inactive_knobs():
    found, is_whole = configurations(space_of(3), None, most=1000, seed=0)
    assert is_whole
    assert found[0] == space_of(3).baseline
    # Nine batch sizes. Without workers, prefetching is inactive; with each of eight worker counts, it has nine values.
    assert len(found) == 9 * (1 + 8 * 9)


def test_range_is_recorded_with_the_own_value_of_the_program():
    space, batch = space_of(2), "loader.batch_size"
    space.domains[batch], own = IntInterval(8, 64, log=True), {batch: 48}
    space = dataclasses.replace(space, baseline={**space.baseline, **own}, reference={**space.reference, **own})
    found, is_whole = configurations(space, None, most=1000, seed=0)
    assert is_whole
    assert {knobs[batch] for knobs in found} == {8, 16, 32, 48, 64}
    assert len(found) == 5 * 9


def test_large_space_is_sampled_near_the_baseline_and_elsewhere():
    found, is_whole = configurations(space_of(4), None, most=60, seed=1)
    space = space_of(4)
    changes = [space.changed(knobs) for knobs in found]
    assert not is_whole
    assert len(found) == len({key_of(changed) for changed in changes}) == 60
    assert changes[0] == {}
    assert sum(len(changed) == 1 for changed in changes) >= 24
    assert sum(len(changed) >= 2 for changed in changes) >= 15
    assert configurations(space, None, most=60, seed=1)[0] == found
    assert configurations(space, None, most=60, seed=2)[0] != found


def test_recording_a_program_that_does_not_work_raises_nothing_worked(recording):
    from autotune.errors import NothingWorked

    bench = recording(Surface(failures=lambda trial, knobs: Failure(signal="SIGSEGV", cause="exit")))
    with pytest.raises(NothingWorked, match="baseline: the unchanged program could not be measured"):
        run_study(bench.inputs, bench.folder, bench.listener)


def test_recorded_program_with_a_nonfinite_loss_is_replayed_as_measured(recording):
    bench = recording(Surface(losses=lambda knobs, seed: [2.0, None, None]), "record.repeats=1")
    bench.run()
    table = table_of(StudyFolder(bench.folder.path))
    assert [one.outcome for one in table.measurements] == [Outcome.ok] * 4
    for one in table.measurements:
        assert classify(facts_of(ended_of(one, trial=0, nonce=""))) == (Outcome.ok, "")


def test_rank_without_a_window_of_its_own_is_exported_with_the_rate_of_its_steps():
    """Its steps vary too much. Raw steps, from which the trial's rate was computed, are not exported."""
    steps = {"warmup": 2, "end_s": [0.5 * number for number in range(1, 13)], "samples": [32.0] * 12}
    window = Window(10, 5.0, 320.0, 64.0, [64.0] * 5, 0.01, True, "interval narrow enough", block_s=[1.0] * 5)
    first = RankResult(0, "", 0, 2, 1, "measured", unit="samples", steps=steps, window=window, throughput_per_s=64.0)
    other = dataclasses.replace(first, rank=1, window=None, throughput_per_s=None)
    evidence = {"exit_code": 0, "cause": "result", "phase": "exit", "is_harness_seen": True, "num_steps": 12}
    made = _measurement(a_trial(1, value=128.0, evidence=evidence), [first, other])
    ended = ended_of(made, trial=1, nonce="")
    assert classify(facts_of(ended))[0] is Outcome.ok
    assert rate_per_s(ended.results) == pytest.approx(128.0)
