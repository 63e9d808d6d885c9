"""A study explains its result with passes of their own kind, which change nothing else."""

import pytest

from autotune.records import Kind, Outcome
from autotune.study import resume_study
from autotune.testing.fake_launcher import Failure, Surface
from tests.explain import made

AUTO = "explain.auto=true"
WASTE = made.line("total += sum(i * i for i in range(20000))", 0.02, function="train", line=12)


def documents(which, knobs):
    if which == "lines":
        return [made.lines(WASTE)]
    return [made.memory()] if which == "memory" else []


def kinds(bench):
    return [trial.kind for trial in bench.trials]


def passes(bench):
    return [(trial.repeats, trial.origin) for trial in bench.trials if trial.kind is Kind.explain]


@pytest.fixture
def explained(bench, tiny):
    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=20)
    return made_bench, made_bench.run()


def test_passes_run_last_for_best_and_baseline(explained):
    bench, summary = explained
    assert summary["status"] == "complete"
    best = summary["best"]["trial"]
    assert best != 0
    last = [(best, "lines"), (0, "lines"), (best, "trace"), (best, "memory"), (0, "trace"), (0, "memory")]
    assert passes(bench) == last
    assert kinds(bench)[-len(last) :] == [Kind.explain] * len(last)


def test_a_pass_has_no_value_and_counts_for_nothing(explained):
    bench, summary = explained
    for trial in bench.trials:
        if trial.kind is Kind.explain:
            assert (trial.outcome, trial.value, trial.score) == (Outcome.ok, None, None)
    assert sum(summary["counts"].values()) == len([kind for kind in kinds(bench) if kind is not Kind.explain])
    assert len(summary["trials"]) == len(bench.trials)


def test_findings_stand_in_the_summary_and_on_disk(explained):
    bench, summary = explained
    entries = {one["role"]: one for one in summary["explanation"]["explained"]}
    assert set(entries) == {"best", "baseline"}
    top = entries["best"]["findings"][0]
    assert top["cause"] == "Python in the step"
    assert top["where"].endswith("train.py:12")
    assert top["gain"]["kind"] == "floor"
    assert top["gain"]["low"] == pytest.approx(0.22, abs=0.03)
    assert bench.folder.read_explanation() == summary["explanation"]


def test_the_verdict_is_the_same_with_and_without_passes(bench, tiny):
    runs = [bench(Surface(documents=documents), f"explain.auto={auto}", *tiny, minutes=60).run() for auto in ("true", "false")]
    assert runs[0]["best"]["overrides"] == runs[1]["best"]["overrides"]
    assert runs[0]["speedup"]["verdict"] == runs[1]["speedup"]["verdict"]


def test_too_little_time_for_a_pass_is_said_and_nothing_is_run(bench, tiny):
    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=1)
    summary = made_bench.run()
    assert not passes(made_bench)
    assert "a tenth of the study's time" in summary["explanation"]["skipped"]
    assert any("Not explained" in notice for notice in made_bench.listener.named("notice"))


def test_passes_take_a_tenth_of_the_time_at_most(bench, tiny):
    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=4)
    made_bench.run()
    spent_s = sum(trial.seconds for trial in made_bench.trials if trial.kind is Kind.explain)
    assert 0 < spent_s <= 0.1 * 4 * 60


def test_no_pass_without_explain_auto(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=20)
    assert made_bench.run()["explanation"] is None
    assert not passes(made_bench)


def test_a_crash_under_a_pass_is_that_passes_outcome(bench, tiny):
    def failures(trial, knobs):
        is_pass = made_bench.launcher.launches[-1].spec.explain == "lines"
        return Failure(signal="SIGSEGV", cause="result", log_tail="crashed") if is_pass else None

    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=20)
    made_bench.surface.failures = failures
    summary = made_bench.run()
    assert summary["status"] == "complete"
    assert summary["speedup"]["verdict"] == "faster"
    assert {one.outcome for one in made_bench.trials if one.origin == "lines"} == {Outcome.crash}
    assert "crash" not in summary["counts"]
    entry = summary["explanation"]["explained"][-1]
    assert entry["passes"]["lines"]["outcome"] == "crash"
    assert any(note.startswith("lines: the pass ended as crash") for note in entry["notes"])


def test_resuming_repeats_no_pass(explained):
    bench, first = explained
    before = passes(bench)
    again = resume_study(bench.inputs, bench.folder, bench.listener)
    assert passes(bench) == before
    assert again["explanation"] == first["explanation"]
    assert again["best"]["trial"] == first["best"]["trial"]


def test_a_pass_that_saw_much_slower_steps_than_were_measured_claims_nothing(bench, tiny):
    def slow(which, knobs):
        return [made.lines(WASTE, seconds=50 * 100.0)] if which == "lines" else documents(which, knobs)

    summary = bench(Surface(documents=slow), AUTO, *tiny, minutes=20).run()
    for entry in summary["explanation"]["explained"]:
        assert not [finding for finding in entry["findings"] if finding["cause"] == "Python in the step"]
        assert any("times as long as when it was measured" in note for note in entry["notes"])
