"""The loss-parity gate in whole studies, on a launcher without processes."""

import dataclasses
from types import SimpleNamespace

import pytest

from autotune.compare.parity import Parity, arithmetic, report
from autotune.config.compose import compose
from autotune.export.formats import render
from autotune.records import Kind, Outcome, TrialRecord
from autotune.study import resume_study
from autotune.trials.session import OutOfTime, Session
from tests.study.conftest import MACHINE
from tests.support.fake_launcher import Failure, Surface
from tests.support.listener import RecordingListener
from tests.support.records import a_trial

GAINS = {("precision.amp", "bf16"): 2.0, ("layout.channels_last", True): 1.2}


def curve(rate, num_steps=64):
    return [2.0 * rate**n for n in range(num_steps)]


def falls_unless(key, value, *, then=1.05):
    """Returns losses that fall by 3 % per step, or change by the factor `then` per step if a knob has the given value."""
    return lambda knobs, seed: curve(then if knobs.get(key) == value else 0.97)


@pytest.fixture
def space(tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("loader.num_workers: [0, 2]\nprecision.amp: ['off', 'bf16']\nlayout.channels_last: [false, true]\n")
    return [f"search_space={file}", "search.sampler=grid"]


def of_kind(trials, kind):
    return [trial for trial in trials if trial.kind is kind]


def test_change_that_makes_the_loss_diverge_is_identified_and_cannot_win(bench, space):
    surface = Surface(gains=GAINS, losses=falls_unless("precision.amp", "bf16"))
    one = bench(surface, *space, minutes=20)
    summary = one.run()
    assert "precision.amp" not in summary["best"]["overrides"]
    assert summary["best"]["overrides"]["layout.channels_last"] is True
    assert summary["parity"]["verdict"] == "passed"
    assert [entry["knobs"] for entry in summary["parity"]["failed"]] == [{"precision.amp": "bf16"}]
    barred = [t for t in summary["trials"] if t["knobs"].get("precision.amp") == "bf16" and t["kind"] == "search"]
    assert {trial["outcome"] for trial in barred} == {"parity"}
    assert all(trial["value"] for trial in barred)  # nothing measured is lost
    assert all("worse, tolerance 5 %" in trial["reason"] for trial in barred)
    runs = of_kind(one.trials, Kind.parity)
    # The baseline; all changes of the fastest trial, which fail; the baseline again; the most likely culprit; the other change.
    assert [sorted(run.changed) for run in runs] == [
        [],
        ["layout.channels_last", "precision.amp"],
        [],
        ["precision.amp"],
        ["layout.channels_last"],
    ]
    assert all(run.kind is not Kind.final or "precision.amp" not in run.changed for run in one.trials)


def test_records_of_losses_that_grow_without_bound_stay_readable(bench, space):
    def losses(knobs, seed):
        is_growing = knobs.get("precision.amp") == "bf16" and seed is not None  # in the comparison, not in the search
        return [0.001 * loss for loss in curve(100.0 if is_growing else 0.97)]

    one = bench(Surface(gains=GAINS, losses=losses), *space, minutes=20)
    one.run()
    failed = next(trial for trial in one.trials if trial.kind is Kind.parity and trial.outcome is Outcome.parity)
    assert failed.losses[-1] == failed.metrics["loss_difference_frac"] == 1e30


def test_change_with_similar_losses_wins_and_the_verdict_states_the_difference(bench, space):
    def losses(knobs, seed):
        return [loss * (1.001 if knobs["precision.amp"] == "bf16" else 1.0) for loss in curve(0.97)]

    one = bench(Surface(gains=GAINS, losses=losses), *space, minutes=20)
    summary = one.run()
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    found = summary["parity"]
    assert (found["verdict"], found["num_steps"], found["failed"]) == ("passed", 40, [])
    ends = "0.7 against 0.699 at the end, relative to half of 2, the baseline's largest loss"
    assert found["text"] == f"within 0.1 % of the baseline's loss over 40 steps ({ends})"
    exported = render(summary, "yaml", None).text.replace("\n#   ", " ")  # long comments are wrapped
    assert f"# Loss parity: {found['text']}" in exported
    runs = of_kind(one.trials, Kind.parity)
    assert [run.outcome for run in runs] == [Outcome.ok, Outcome.ok]  # the baseline, and all finalists' changes together
    assert runs[1].repeats in {trial.number for trial in of_kind(one.trials, Kind.search)}


def test_exact_changes_need_no_comparison_of_losses(bench, tmp_path):
    file = tmp_path / "exact.yaml"
    file.write_text("threads.intra: [1, 2]\n")
    surface = Surface(gains={("threads.intra", 1): 1.5}, losses=falls_unless("threads.intra", 1))
    one = bench(surface, f"search_space={file}")
    summary = one.run()
    assert summary["best"]["overrides"] == {"threads.intra": 1}
    assert summary["parity"]["verdict"] == "not needed"
    assert of_kind(one.trials, Kind.parity) == []


def test_without_losses_nothing_is_compared_and_the_winner_is_not_checked(bench, space):
    one = bench(Surface(gains=GAINS), *space, minutes=20)
    summary = one.run()
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert summary["parity"]["verdict"] == "not checked"
    assert summary["parity"]["text"].startswith("not checked: no loss was seen: backward() was not called")
    assert of_kind(one.trials, Kind.parity) == []


@pytest.mark.thorough
def test_failed_parity_run_leaves_the_winner_unchecked_and_says_so(bench, space):
    def failures(trial, knobs):
        is_parity = one.launcher.launches[-1].spec.mode == "parity"
        return Failure(error={"type": "ValueError", "message": "no", "traceback": ""}) if is_parity else None

    one = bench(Surface(gains=GAINS, losses=lambda *_: curve(0.97), failures=failures), *space, minutes=20)
    summary = one.run()
    assert summary["status"] == "complete"
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert summary["parity"]["text"] == "not checked: the baseline's run ended as error: ValueError: no"
    assert [run.outcome for run in of_kind(one.trials, Kind.parity)] == [Outcome.error]


@pytest.mark.thorough
def test_configured_tolerance_decides_which_losses_pass(bench, space):
    losses = falls_unless("precision.amp", "bf16", then=0.98)
    usual = bench(Surface(gains=GAINS, losses=losses), *space, minutes=20).run()
    assert "precision.amp" not in usual["best"]["overrides"]
    strict = bench(Surface(gains=GAINS, losses=losses), *space, "parity.tolerance=1.0", minutes=20).run()
    assert strict["best"]["overrides"]["precision.amp"] == "bf16"


@pytest.mark.thorough
def test_parity_steps_0_disables_the_comparison(bench, space):
    losses = falls_unless("precision.amp", "bf16")
    summary = bench(Surface(gains=GAINS, losses=losses), *space, "parity.steps=0", minutes=20).run()
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert summary["parity"]["verdict"] == "not checked"


def test_batch_size_is_reported_to_change_training_and_fails_if_the_loss_explodes(bench, tmp_path):
    file = tmp_path / "batch.yaml"
    file.write_text("loader.batch_size: [32, 64, 256]\n")

    def losses(knobs, seed):
        return curve(1.2 if knobs["loader.batch_size"] == 256 else 0.97)

    summary = bench(Surface(losses=losses, half_batch=64), f"search_space={file}").run()
    assert summary["best"]["overrides"] == {"loader.batch_size": 64}
    assert summary["parity"]["text"].startswith("batch 64 changes the training itself")
    outcomes = {trial["knobs"]["loader.batch_size"]: trial for trial in summary["trials"] if trial["kind"] == "search"}
    assert outcomes[256]["outcome"] == "parity"
    assert outcomes[256]["reason"].startswith("the loss exploded: 2 at first")


@pytest.mark.thorough
def test_search_after_a_failed_comparison_leaves_out_the_failed_change(bench):
    surface = Surface(gains=GAINS, losses=falls_unless("precision.amp", "bf16"), compile_s=5.0)
    one = bench(surface, minutes=12)
    one.run()
    trials = one.trials
    failed = next(t for t in trials if t.kind is Kind.parity and t.outcome is Outcome.parity and len(t.changed) == 1)
    later = [trial for trial in of_kind(trials, Kind.search) if trial.number > failed.number]
    assert failed.changed == {"precision.amp": "bf16"}
    assert later
    assert all("precision.amp" not in trial.changed for trial in later)


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ({}, Outcome.ok),
        ({"violations": {"constraints.max_step_p95_s": 0.5}}, Outcome.infeasible),
        ({"reason": "slower; constraints.max_power_w could not be checked"}, Outcome.infeasible),
    ],
)
def test_raced_trial_that_violates_a_constraint_is_not_readmitted(more, outcome):
    failed = {"verdict": "failed", "reason": "the loss differs"}
    records = [
        a_trial(0, value=50.0),
        a_trial(1, value=100.0, changed={"precision.amp": "bf16"}),
        a_trial(2, value=70.0, changed={"layout.channels_last": True}, outcome=Outcome.raced, **more),
        a_trial(3, kind=Kind.parity, changed={"precision.amp": "bf16"}, outcome=Outcome.parity, evidence={"parity": failed}),
    ]
    session = SimpleNamespace(
        inputs=SimpleNamespace(config=compose([], command=["true"], facts=MACHINE).config),
        records=records,
        searched=records[:3],
        folder=SimpleNamespace(write_trial=lambda record: None),
        recount=lambda: None,
    )
    Parity(session)
    assert [record.outcome for record in records[1:3]] == [Outcome.parity, outcome]


@pytest.mark.parametrize(("left_s", "has_time"), [(139.0, False), (141.0, True)])
def test_losses_are_compared_only_in_time_that_the_finals_do_not_need(tmp_path, left_s, has_time):
    """Losses need two runs of 15 s. An interval needs two pairs of the finals, of 15 s and 40 s each: together 140 s."""
    baseline = TrialRecord(number=0, kind=Kind.baseline, knobs={}, changed={}, outcome=Outcome.ok, value=1.0, seconds=15.0)
    baseline.phases_s, baseline.losses = {"steady": 5.0}, curve(0.97)
    candidate = dataclasses.replace(baseline, number=1, kind=Kind.search, changed={"precision.amp": "bf16"}, seconds=40.0)
    candidate.evidence, written, listener = {}, [], RecordingListener()
    session = SimpleNamespace(
        inputs=SimpleNamespace(config=compose([], command=["true"], facts=MACHINE).config),
        records=[baseline, candidate],
        baseline=baseline,
        budget=SimpleNamespace(left_s=left_s),
        costs=SimpleNamespace(again_s=lambda *_: 1000.0),
        folder=SimpleNamespace(write_trial=written.append),
        listener=listener,
    )
    search, finals = Parity(session), Parity(session)  # the user is notified once, not by each of them
    assert [each.is_open(candidate) for each in (search, search, finals)] == [has_time] * 3
    assert written == ([] if has_time else [candidate])
    assert len(listener.named("notice")) == len(written)
    why = "it was not compared yet" if has_time else "no time was left for it: the finals need the rest"
    assert report(candidate, [baseline, candidate])["text"] == f"not checked: {why}"


@pytest.mark.parametrize(("minutes", "start_s"), [(3, 12), (4, 20), (8, 40)])
def test_comparison_of_losses_leaves_the_finals_enough_time_for_an_interval(bench, space, minutes, start_s):
    surface = Surface(gains=GAINS, losses=lambda knobs, seed: curve(0.97), start_s=start_s, loader_per_s=1e6)
    summary = bench(surface, *space, minutes=minutes).run()
    assert summary["speedup"]["ci"] is not None
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert summary["parity"]["verdict"] == "passed" or "no time was left" in summary["parity"]["text"]


def test_resumed_study_does_not_compare_losses_again(bench, space):
    surface = Surface(gains=GAINS, losses=falls_unless("precision.amp", "bf16"))
    one = bench(surface, *space, minutes=20)
    first = one.run()
    num_runs = len(of_kind(one.trials, Kind.parity))
    again = resume_study(one.inputs, one.folder, RecordingListener())
    assert len(of_kind(one.trials, Kind.parity)) == num_runs
    assert again["parity"] == first["parity"]
    assert again["best"]["overrides"] == first["best"]["overrides"]


def test_study_interrupted_during_a_comparison_of_losses_is_completed_by_resume(bench, space):
    def failures(trial, knobs):
        is_second = [launch.spec.mode for launch in one.launcher.launches].count("parity") == 2
        return Failure(raises=KeyboardInterrupt) if is_second and not asked.append(1) and len(asked) == 1 else None

    asked = []
    one = bench(Surface(gains=GAINS, losses=falls_unless("precision.amp", "bf16"), failures=failures), *space, minutes=20)
    summary = one.run()
    assert summary["status"] == "interrupted"
    assert summary["parity"]["text"] == "not checked: it was not compared yet"
    assert of_kind(one.trials, Kind.parity)[-1].outcome is Outcome.interrupted
    again = resume_study(one.inputs, one.folder, RecordingListener())
    assert again["status"] == "complete"
    assert "precision.amp" not in again["best"]["overrides"]


def test_interrupted_parity_run_is_repeated_when_the_study_is_resumed(bench, space):
    """The interrupted study said "not checked: its run ended as interrupted". After a resume, the check must run."""
    one = bench(Surface(gains=GAINS, losses=falls_unless("precision.amp", "none")), *space, minutes=20)
    one.run()
    run = next(run for run in of_kind(one.trials, Kind.parity) if run.changed)
    run.outcome, run.reason = Outcome.interrupted, "the trial's time was up"
    run.evidence["parity"] |= {"verdict": "unknown", "reason": "its run ended as interrupted"}
    one.folder.write_trial(run)
    again = resume_study(one.inputs, one.folder, RecordingListener())
    runs = [run for run in of_kind(one.trials, Kind.parity) if run.changed]
    assert [run.outcome is Outcome.interrupted for run in runs] == [True, False]
    assert again["parity"]["verdict"] == "passed"


def test_resumed_study_makes_the_second_baseline_run_that_had_no_time(bench, space, monkeypatch):
    def late(self, changed, candidate, *, seed, **others):
        if seed != self.inputs.config.study.seed:
            raise OutOfTime
        return first_steps(self, changed, candidate, seed=seed, **others)

    first_steps, losses = Session.first_steps, falls_unless("precision.amp", "bf16")
    one = bench(Surface(gains=GAINS, losses=losses), *space, minutes=20)
    with monkeypatch.context() as patched:
        patched.setattr(Session, "first_steps", late)
        first = one.run()
    assert first["best"]["overrides"]["precision.amp"] == "bf16"
    assert "no time was left to see whether two runs" in first["parity"]["text"]
    resume_study(one.inputs, one.folder, RecordingListener())
    again = [run for run in of_kind(one.trials, Kind.parity) if run.changed]
    assert Outcome.parity in {run.outcome for run in again}


def test_failed_second_baseline_run_rules_out_no_configuration(bench, space):
    def failures(trial, knobs):
        spec = one.launcher.launches[-1].spec
        is_second = spec.mode == "parity" and spec.seed != one.inputs.config.study.seed
        return Failure(error={"type": "ValueError", "message": "no", "traceback": ""}) if is_second else None

    losses = falls_unless("precision.amp", "bf16")
    one = bench(Surface(gains=GAINS, losses=losses, failures=failures), *space, minutes=20)
    summary = one.run()
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert summary["parity"]["verdict"] == "not checked"
    assert "is not known, because the second one ended as error: ValueError: no" in summary["parity"]["text"]


def test_losses_are_compared_for_variables_that_are_not_known_to_be_harmless():
    changed = {"env.PRECISION": "fp16", "env.LD_PRELOAD": "x.so", "env.NCCL_DEBUG": "INFO", "threads.intra": 1}
    assert arithmetic({**changed, "loader.batch_size": 64, "compile.mode": "default"}) == {
        "env.PRECISION": "fp16",
        "compile.mode": "default",
    }


def test_losses_of_finalists_that_are_not_chosen_are_not_compared(bench, tmp_path):
    """A comparison takes as long as a pair of the finals, and a pair says more about the winner."""
    file = tmp_path / "space.yaml"
    file.write_text("precision.amp: ['off', 'bf16']\nlayout.channels_last: [false, true]\noptimizer.implementation: auto\n")
    gains = {("precision.amp", "bf16"): 2.0, ("optimizer.implementation", "foreach"): 1.9}
    surface = Surface(gains=gains, losses=lambda knobs, seed: curve(0.97))
    one = bench(surface, f"search_space={file}", "study.budget.trials=8", minutes=60)
    summary = one.run()
    assert summary["parity"]["verdict"] == "passed"
    compared = [set(run.changed) for run in of_kind(one.trials, Kind.parity) if run.changed]
    assert len(compared) == len({frozenset(changed) for changed in compared}) <= 2
    assert any(set(summary["best"]["overrides"]) <= changed for changed in compared)
