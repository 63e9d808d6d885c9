import contextlib
import errno
import json
import subprocess

import pytest

from autotune.errors import BadInput, NothingWorked
from autotune.records import Kind, Outcome
from tests.study.conftest import Bench
from tests.support.fake_launcher import Failure, Surface

FAST = {("precision.amp", "bf16"): 1.8, ("layout.channels_last", True): 1.3, ("threads.intra", 4): 1.2}


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A finished study, and its summary. Tests must not change them."""
    study = Bench(tmp_path_factory.mktemp("fast"), Surface(gains=FAST))
    return study, study.run()


@pytest.mark.parametrize("seed", range(2))
def test_a_faster_configuration_is_found_and_proven(bench, fast, seed):
    study, summary = fast
    if seed:
        study = bench(Surface(gains=FAST), seed=seed)
        summary = study.run()
    assert summary["status"] == "complete"
    assert summary["speedup"]["verdict"] == "faster"
    assert summary["speedup"]["ci"][0] > 1.8
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    true_ratio = study.surface.rate_per_s(
        {**study.surface.observed, **summary["best"]["overrides"]}
    ) / study.surface.rate_per_s(study.surface.observed)
    assert summary["speedup"]["ratio"] == pytest.approx(true_ratio, rel=0.03)


def test_baseline_runs_first_with_nothing_changed(fast):
    study, _ = fast
    first = study.launcher.launches[0].spec
    assert (first.trial, first.knobs, first.target) == (0, {}, None)
    assert study.trials[0].kind is Kind.baseline
    assert study.trials[0].knobs["loader.batch_size"] == 32, "the program's own values are read off the baseline"
    assert all(launch.spec.target for launch in study.launcher.launches[1:])


@pytest.mark.parametrize(("start_s", "window_s", "minutes"), [(2.0, 3.0, 3), (6.0, 8.0, 6), (10.0, 15.0, 8)])
def test_study_keeps_its_budget_for_cheap_and_expensive_trials(bench, start_s, window_s, minutes):
    study = bench(Surface(gains=FAST, start_s=start_s, window_s=window_s), minutes=minutes)
    summary = study.run()
    assert study.clock.now_s - 1000 <= minutes * 60 * 1.1
    assert summary["speedup"]["num_rounds"] >= 3
    assert summary["speedup"]["verdict"] == "faster"


def test_budget_is_roughly_kept_with_a_compilation_of_one_minute(bench):
    study = bench(
        Surface(gains={**FAST, ("compile.mode", "default"): 1.5}, start_s=8.0, window_s=14.0, compile_s=60.0), minutes=8
    )
    study.run()
    assert study.clock.now_s - 1000 <= 10 * 60


def test_trial_budget_counts_only_search_trials(bench):
    study = bench(Surface(gains=FAST), "study.budget.trials=4")
    study.run()
    assert sum(trial.kind is Kind.search for trial in study.trials) == 4


def test_pinned_knobs_apply_to_the_baseline_and_all_other_trials(bench):
    study = bench(Surface(gains=FAST), "loader.num_workers=2", is_kept=True)
    summary = study.run()
    assert study.launcher.launches[0].spec.knobs == {"loader.num_workers": 2}
    assert all(launch.spec.knobs["loader.num_workers"] == 2 for launch in study.launcher.launches)
    assert "loader.num_workers" not in summary["best"]["overrides"]
    assert "num_workers: 2" in study.folder.best_file.read_text()


def test_program_that_does_not_train_stops_the_study_and_says_why(bench):
    def failures(trial, knobs):
        error = {"type": "ValueError", "message": "bad shape", "traceback": "Traceback\n  train.py\nValueError: bad shape"}
        return Failure(error=error)

    study = bench(Surface(failures=failures))
    with pytest.raises(
        NothingWorked, match=r"(?s)baseline: .*got error: ValueError: bad shape.*\| ValueError: bad shape"
    ) as raised:
        study.run()
    assert raised.value.exit_code == 3
    assert study.folder.read_summary()["status"] == "failed"
    assert len(study.launcher.launches) == 1, "a trial with an exception of the user's code is not repeated"


def test_verdict_is_same_or_ambiguous_if_nothing_beats_the_baseline(bench):
    worse = {("precision.amp", "bf16"): 0.4, ("layout.channels_last", True): 0.8, ("threads.intra", 4): 0.9}
    study = bench(Surface(gains=worse, half_batch=0.01, loader_per_s=1e6, noise_frac=0.002), is_kept=True)
    summary = study.run()
    assert summary["speedup"]["verdict"] in ("same", "ambiguous")
    assert summary["best"]["trial"] == 0
    assert summary["best"]["overrides"] == {}
    assert "nothing to change" in study.folder.best_file.read_text()


def test_a_trial_that_is_not_ok_never_wins(bench):
    def failures(trial, knobs):
        return Failure(is_unsteady=True) if knobs["loader.batch_size"] == 128 else None

    study = bench(Surface(gains=FAST, failures=failures))
    summary = study.run()
    assert Outcome.unsteady in {trial.outcome for trial in study.trials}
    assert summary["best"]["knobs"]["loader.batch_size"] != 128
    assert all(trial.knobs["loader.batch_size"] != 128 for trial in study.trials if trial.kind is Kind.final)


def test_out_of_memory_is_an_outcome_and_does_not_end_the_study(bench):
    study = bench(Surface(gains=FAST, max_batch=64))
    summary = study.run()
    assert summary["counts"]["device_oom"] >= 1
    assert summary["best"]["knobs"]["loader.batch_size"] <= 64
    assert summary["speedup"]["verdict"] == "faster"


def test_the_whole_study_is_on_disk(fast):
    study, summary = fast
    assert study.folder.read_summary() == summary
    assert study.folder.config_file.read_text() == study.inputs.yaml
    about = study.folder.read_study()
    assert about.versions["torch"] == "2.14.1"
    assert about.command == ["python", "-c", "pass"]
    assert "precision.amp" in about.space
    assert study.folder.journal_file.exists()
    assert [trial["number"] for trial in summary["trials"]] == list(range(len(study.trials)))
    assert json.loads(json.dumps(summary)) == summary


def test_listener_receives_all_events_in_order(fast):
    study, summary = fast
    names = [name for name, _ in study.listener.calls if name != "notice"]
    assert names[0] == "started"
    assert names[-1] == "finished"
    assert names.count("trial_started") == names.count("trial_ended") == len(study.trials)
    assert names.count("finals_started") == 1
    assert study.listener.named("finals_started")[0][0] == 0
    assert study.listener.num_progress > 0
    assert study.listener.named("finished") == [summary]
    assert study.launcher.is_closed


@pytest.mark.parametrize("is_cut_short", [False, True], ids=["at its end", "after a fault"])
def test_job_that_may_still_hold_nodes_is_reported(bench, tiny, is_cut_short):
    surface = Surface(failures=lambda number, knobs: Failure(raises=BadInput("no node")) if number == 1 else None)
    study = bench(surface if is_cut_short else None, *tiny, "study.budget.trials=1")
    study.launcher.unended = lambda: ["Job 12 may still hold nodes"] if study.launcher.is_closed else []
    with pytest.raises(BadInput, match="no node") if is_cut_short else contextlib.nullcontext():
        study.run()
    assert study.listener.named("notice")[-1] == "Job 12 may still hold nodes"


def test_baseline_that_uses_up_the_budget_names_the_key_to_raise(bench):
    study = bench(Surface(failures=lambda *_: Failure(cause="deadline")))
    with pytest.raises(NothingWorked, match=r"more time than study\.budget\.minutes=4 allows, raise"):
        study.run()


class FakeTracking:
    def __init__(self, folder, *, is_stuck=False):
        self.folder, self.is_stuck, self.is_terminated, self.status_seen = folder, is_stuck, False, None
        self.waited_s, self.is_hurried = 0.0, False

    def wait(self, timeout=None):
        self.waited_s += timeout
        self.status_seen = self.folder.read_summary()["status"]
        if self.is_stuck:
            raise subprocess.TimeoutExpired("sync", timeout)
        return 0

    def terminate(self):
        self.is_terminated = True

    def hurry(self):
        self.is_hurried = True


@pytest.mark.parametrize(
    ("is_stuck", "is_interrupted", "minutes", "waited_s"),
    [(False, False, 30, 3.0), (True, False, 30, 60.0), (True, False, 0.1, 5.0), (True, True, 30, 5.0)],
)
def test_tracker_of_a_complete_study_is_awaited_while_the_budget_lasts(bench, is_stuck, is_interrupted, minutes, waited_s):
    started = []

    def start_tracking(folder):
        assert folder.study_file.exists()
        started.append(FakeTracking(folder, is_stuck=is_stuck))
        return started[0]

    def failures(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if is_interrupted and trial == 1 else None

    study = bench(
        Surface(gains=FAST, failures=failures), "study.budget.trials=2", minutes=minutes, start_tracking=start_tracking
    )
    study.run()
    assert started[0].waited_s == waited_s
    expected = "interrupted" if is_interrupted else "complete"
    assert started[0].status_seen == expected, "the tracking process ends when it reads that the study has ended"
    assert started[0].is_terminated is is_stuck
    assert started[0].is_hurried is (waited_s == 60)
    assert any("autotune sync s" in line for line in study.listener.named("notice")) is is_stuck


def test_tracker_that_cannot_be_started_again_at_the_end_does_not_fail_the_study(bench):
    class Tracking(FakeTracking):
        def hurry(self):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    study = bench(None, "study.budget.trials=1", minutes=30, start_tracking=lambda folder: Tracking(folder, is_stuck=True))
    assert study.run()["status"] == "complete"
    assert any("not be started again (Resource temp" in line for line in study.listener.named("notice"))


def test_best_of_each_tier_is_reported_and_changes_only_what_the_tier_allows(fast):
    _, summary = fast
    tiers = summary["best_by_tier"]
    assert set(tiers) == {"exact", "numerics", "training"}
    assert set(tiers["exact"]["overrides"]) <= {
        key for key in summary["best"]["knobs"] if key.startswith(("loader.", "threads.", "memory."))
    } - {"loader.batch_size"}
    assert "loader.batch_size" not in tiers["numerics"]["overrides"]
    assert tiers["numerics"]["overrides"]["precision.amp"] == "bf16"
    assert tiers["training"]["trial"] == summary["best"]["trial"]
    assert tiers["training"]["measured_in"] == "finals"


def test_search_limited_to_a_tier_changes_only_its_knobs(bench):
    study = bench(Surface(gains=FAST), "tiers=exact")
    study.run()
    changed = {key for trial in study.trials for key in trial.changed}
    assert changed
    assert not any(key.startswith(("precision.", "layout.", "compile.", "optimizer.")) for key in changed)


def test_budget_for_only_the_baseline_gives_an_ambiguous_verdict(bench):
    study = bench(Surface(gains=FAST), minutes=0.1)
    summary = study.run()
    assert summary["best"]["overrides"] == {}
    assert summary["speedup"]["ci"] is None
    assert summary["speedup"]["verdict"] == "ambiguous"
    assert "nothing but the baseline" in summary["speedup"]["reason"]


def test_diagnosis_of_a_slow_loader_states_the_gain_of_an_infinitely_fast_one(bench):
    study = bench(Surface(loader_per_s=20.0), "loader.num_workers=0", "study.budget.trials=2")
    (finding,) = study.run()["diagnosis"]
    assert finding["finding"] == "input-bound"
    assert "an infinitely fast loader would give at most +" in finding["advice"]


def test_requested_knob_that_cannot_be_searched_is_reported(bench):
    study = bench(Surface(), "search_space=none", "loader.in_order=choice(true,false)", "precision.amp=choice(off,bf16)")
    study.run()
    (said,) = [line for line in study.listener.named("notice") if "is not searched here" in line]
    assert said.startswith("loader.in_order is not searched here: has no effect with")
