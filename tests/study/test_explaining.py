"""A study explains its result with separate passes, which leave all other results unchanged."""

import os
import re

import pytest

from autotune.config.command import CommandTemplate
from autotune.errors import BadInput, NoNode
from autotune.explain import findings
from autotune.explain.explanation import empty
from autotune.explain.findings import Finding
from autotune.explain.findings.finding import Without
from autotune.explain.gains import Gain
from autotune.explain.tables import read_tables
from autotune.explained import gain_text, size_text
from autotune.failures import LOSS
from autotune.harness.explain.documents import MAIN
from autotune.records import Kind, Outcome
from autotune.run_dir import StudyFolder
from autotune.studies import call
from autotune.study import Wanted, explain_study, resume_study
from autotune.study.explaining import Explaining, explainable
from autotune.study.remedies import MAX_CHECKS, MAX_PAIRS, ORDER, WIDE_FRAC
from autotune.study.writing import Writer
from autotune.trials.budget import COMPILE_S
from autotune.trials.configurations import configuration_key
from autotune.trials.not_finite import NOT_FINITE, caveat, excused
from autotune.trials.schedule import Ending
from autotune.trials.session import OVERRUN_FACTOR
from tests.explain import made
from tests.explain.passes import step_of_the_cpu, traced
from tests.study.conftest import Bench, tiny_space
from tests.support.fake_launcher import OUT_OF_MEMORY, Failure, FakeRunning, Surface
from tests.support.records import a_trial
from tests.support.rows import more

AUTO = "explain.auto=true"
WASTE = made.line("total += sum(i * i for i in range(20000))", 0.02, function="<module>", line=12)


def documents(which, knobs):
    if which == "lines":
        return [made.lines(WASTE)]
    return [made.memory()] if which == "memory" else []


def kinds(bench):
    return [trial.kind for trial in bench.trials]


def passes(bench):
    return [(trial.repeats, trial.origin) for trial in bench.trials if trial.kind is Kind.explain]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """A finished study with all passes, and its summary. Tests must not change them."""
    folder = tmp_path_factory.mktemp("explained")
    made_bench = Bench(folder, Surface(documents=documents), AUTO, *tiny_space(folder), minutes=20)
    return made_bench, made_bench.run()


def test_passes_run_last_for_best_and_baseline(explained):
    bench, summary = explained
    assert summary["status"] == "complete"
    best = summary["best"]["trial"]
    assert best != 0
    last = [(best, "lines"), (0, "lines"), (best, "trace"), (best, "memory"), (0, "trace"), (0, "memory")]
    assert passes(bench) == last
    assert kinds(bench)[-len(last) :] == [Kind.explain] * len(last)


def test_pass_has_no_value_and_is_excluded_from_the_counts(explained):
    bench, summary = explained
    for trial in bench.trials:
        if trial.kind is Kind.explain:
            assert (trial.outcome, trial.value, trial.score) == (Outcome.ok, None, None)
    assert sum(summary["counts"].values()) == len([kind for kind in kinds(bench) if kind is not Kind.explain])
    assert len(summary["trials"]) == len(bench.trials)


def test_findings_are_in_the_summary_and_on_disk(explained):
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


def test_no_pass_runs_without_time_for_it_and_the_summary_says_so(bench, tiny):
    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=1)
    summary = made_bench.run()
    assert not passes(made_bench)
    assert "a tenth of the study's time" in summary["explanation"]["skipped"]
    assert any("Not explained" in notice for notice in made_bench.listener.named("notice"))


def test_compiled_best_is_explained_if_a_pass_fits_with_what_the_study_has_compiled(bench):
    """Its search trial took 84 s to compile and start. Since the finals, it is known that a pass takes half of that."""
    surface = Surface(documents=documents, gains={("compile.mode", "default"): 2.0}, compile_s=80.0)
    made_bench = bench(surface, AUTO, "search_space=none", "compile.mode=choice(off,default)", minutes=12)
    best = made_bench.run()["best"]
    assert best["overrides"] == {"compile.mode": "default"}
    assert (best["trial"], "lines") in passes(made_bench)


def test_suggested_command_names_the_folder_if_a_later_study_has_the_same_name(bench, tiny):
    first, later = (bench(Surface(documents=documents), AUTO, *tiny, minutes=1) for _ in range(2))
    later.folder.sequence = first.folder.sequence + 1
    later.run()
    assert f"`autotune explain {first.folder.path} " in first.run()["explanation"]["skipped"]


def test_only_the_best_is_explained_in_time_that_the_study_left_over(bench, tiny):
    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=4, poll_s=0.25)
    best = made_bench.run()["best"]["trial"]
    in_a_tenth, left_over = [(best, "lines"), (0, "lines")], [(best, "trace"), (best, "memory")]
    assert passes(made_bench) == [*in_a_tenth, *left_over]
    assert sum(trial.seconds for trial in made_bench.trials) <= 4 * 60


def test_no_pass_runs_without_explain_auto(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    assert made_bench.run()["explanation"] is None
    assert not passes(made_bench)


def test_crash_during_a_pass_is_recorded_only_for_that_pass(bench, tiny):
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


def test_a_pass_that_was_ended_by_a_signal_is_run_again(bench, tiny):
    ended = []

    def failures(trial, knobs):
        if made_bench.launcher.launches[-1].spec.explain != "lines" or ended:
            return None
        ended.append(trial)
        return Failure(signal="SIGSEGV", cause="result", log_tail="crashed")

    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=20)
    made_bench.surface.failures = failures
    entry = made_bench.run()["explanation"]["explained"]
    assert [one.outcome for one in made_bench.trials if one.origin == "lines"] == [Outcome.crash, Outcome.ok, Outcome.ok]
    assert {one["passes"]["lines"]["outcome"] for one in entry} == {"ok"}


def test_resuming_repeats_no_pass(bench, tiny):
    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=20)
    first, before = made_bench.run(), passes(made_bench)
    again = resume_study(made_bench.inputs, made_bench.folder, made_bench.listener)
    assert passes(made_bench) == before
    assert again["explanation"] == first["explanation"]
    assert again["best"]["trial"] == first["best"]["trial"]


def test_pass_with_much_slower_steps_than_the_trial_gives_no_findings(bench, tiny):
    def slow(which, knobs):
        return [made.lines(WASTE, seconds=50 * 100.0)] if which == "lines" else documents(which, knobs)

    explained = bench(Surface(documents=slow), AUTO, *tiny, minutes=20).run()["explanation"]["explained"]
    assert explained
    for entry in explained:
        assert not [finding for finding in entry["findings"] if finding["cause"] == "Python in the step"]
        assert any("times as long as in the trial" in note for note in entry["notes"])


def fused(which, knobs):
    """Returns the documents of a program whose optimizer takes a third of the step."""
    return [made.lines(made.line("loss.backward()", 0.05), phases_s=made.phases(optimizer=0.03))] if which == "lines" else []


COMPILE = "compile.mode"
FASTER = {("optimizer.implementation", "fused"): 1.3}
OBSERVED = {**Surface().observed, "optimizer.implementation": "default"}


def explain(bench, **wanted):
    """Explains a finished study, as `autotune explain` does."""
    bench.inputs.config.study.budget.minutes = None
    return explain_study(bench.inputs, bench.folder, bench.listener, Wanted(**wanted))


def notes_on_disturbance(bench):
    """Explains a finished study while other processes use cores; returns the notes on this."""
    bench.cpu.foreign_cores = 1.0
    (entry,) = explain(bench, passes=("lines", "memory"))["explanation"]["explained"]
    return [note for note in entry["notes"] if "other programs used 1 of 4 cores" in note]


def test_disturbed_passes_are_named_and_repeated_when_the_study_is_explained_again(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    notes = notes_on_disturbance(made_bench)
    assert [note.partition(":")[0] for note in notes] == ["lines", "memory"]
    assert "its times and shares may be wrong; `autotune explain" in notes[0]
    made_bench.cpu.foreign_cores = 0.0
    (entry,) = explain(made_bench, passes=("lines",))["explanation"]["explained"]
    assert [name for _, name in passes(made_bench)] == ["lines", "memory", "lines"]
    assert [note.partition(":")[0] for note in entry["notes"] if "other programs" in note] == ["memory"]


@pytest.mark.thorough
def test_disturbed_passes_are_named_but_not_repeated_if_the_study_accepts_disturbances(bench, tiny):
    made_bench = bench(Surface(documents=documents), "measure.quiet=false", *tiny, minutes=2)
    made_bench.run()
    notes = notes_on_disturbance(made_bench)
    assert [note.endswith("may be wrong") for note in notes] == [True, True]
    explain(made_bench, passes=("lines",))
    assert [name for _, name in passes(made_bench)] == ["lines", "memory"]


def test_explaining_a_finished_study_changes_only_explanation_and_trials(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2, is_kept=True)
    before = made_bench.run()
    after = explain(made_bench, passes=("lines",))
    assert passes(made_bench) == [(before["best"]["trial"], "lines")]
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"explanation", "num_trials", "trials"}
    assert made_bench.folder.read_summary() == after
    assert "Python in the step" in made_bench.folder.best_file.read_text()


def test_files_that_a_pass_leaves_are_listed_in_the_summary(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    made_bench.surface.files_left["notes.txt"] = 10
    left = explain(made_bench, passes=("lines",))["files"]["left"]
    (number,) = (one.number for one in made_bench.trials if one.kind is Kind.explain)
    assert left == [{"name": "notes.txt", "bytes": 10, "trial": number}]


def test_explaining_a_killed_study_does_not_call_it_running(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.folder.write_summary({**made_bench.run(), "status": "running", "reason": ""})
    assert explain(made_bench, passes=("lines",))["status"] == "interrupted"
    assert made_bench.folder.read_summary()["status"] == "interrupted"


def test_explaining_a_recording_writes_no_best_yaml(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2, is_kept=True)
    summary = made_bench.run()
    made_bench.folder.best_file.unlink()  # a recording has none
    made_bench.folder.write_summary({**summary, "recording": {"configurations": 4, "repeats": 3, "trials": 12}})
    explain(made_bench, passes=("lines",))
    assert not made_bench.folder.best_file.exists()


def test_explanation_is_shown_before_the_tracker_is_awaited(bench, tiny):
    made_bench, shown = bench(Surface(documents=documents), *tiny, minutes=2), []
    made_bench.run()
    made_bench.inputs.start_tracking = lambda _: shown.extend(made_bench.listener.named("finished"))
    after = explain(made_bench, passes=("lines",))
    assert shown[1:] == [after]  # the first is the study's own verdict


def test_a_pass_that_ran_is_not_run_again(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("lines",))
    explain(made_bench, trial=0, passes=("lines", "memory"))
    assert passes(made_bench) == [(0, "lines"), (0, "memory")]


def test_pass_of_a_program_that_ended_too_soon_is_said_to_have_failed(bench, tiny, monkeypatch):
    """It wrote nothing, but counted as a pass that ran: it was never repeated, and no note said why nothing is known."""
    result = FakeRunning._result

    def ended(running):
        made = result(running)
        made.status = "ended" if made_bench.launcher.launches[-1].spec.explain else made.status
        return made

    monkeypatch.setattr(FakeRunning, "_result", ended)
    made_bench = bench(Surface(documents=documents), *tiny, minutes=20)
    made_bench.run()
    for _ in range(2):
        (entry,) = explain(made_bench, trial=0, passes=("trace", "memory"))["explanation"]["explained"]
    assert passes(made_bench) == [(0, "trace"), (0, "memory"), (0, "trace")]
    assert {name: one["outcome"] for name, one in entry["passes"].items()} == {"trace": "error", "memory": "ok"}
    assert any(note.startswith("trace: the pass ended as error, the program ended before") for note in entry["notes"])


def test_tables_of_a_trace_stay_after_the_trace_was_pruned(bench, tiny):
    made_bench = bench(Surface(documents=lambda which, knobs: [traced()] if which == "trace" else []), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("trace",))
    (folder,) = (made_bench.folder.trial_path(one.number) for one in made_bench.trials if one.kind is Kind.explain)
    step_of_the_cpu(folder)
    explain(made_bench, trial=0, passes=("trace",))
    before = read_tables(folder).rows("breakdown")
    (folder / "trace.rank0.json.gz").unlink()
    explain(made_bench, trial=0, passes=("trace", "lines"))
    assert read_tables(folder).rows("breakdown") == before
    assert before


def test_tables_of_later_passes_are_written_after_the_trace_was_pruned(bench, tiny):
    """The report said for good that the pass was not run."""

    def written(which, knobs):
        return [traced()] if which == "trace" else documents(which, knobs)

    made_bench = bench(Surface(documents=written), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("trace",))
    (folder,) = (made_bench.folder.trial_path(one.number) for one in made_bench.trials if one.kind is Kind.explain)
    step_of_the_cpu(folder)
    explain(made_bench, trial=0, passes=("trace",))
    before = read_tables(folder)
    (folder / "trace.rank0.json.gz").unlink()
    (entry,) = explain(made_bench, trial=0, passes=("trace", "lines", "memory"))["explanation"]["explained"]
    found = read_tables(folder)
    assert {"lines", "memory"} <= set(found.tables)
    assert not {"lines", "memory", "breakdown"} & set(found.absent)
    assert (found.rows("breakdown"), found.timeline, found.absent["kernels"]) == (
        before.rows("breakdown"),
        before.timeline,
        before.absent["kernels"],
    )
    assert not [note for note in entry["notes"] if note.startswith("trace: not known")]


def test_recommended_setting_is_tried_in_two_pairs(bench, tiny):
    made_bench = bench(Surface(documents=fused, gains=FASTER, observed=OBSERVED), *tiny, minutes=2)
    made_bench.run()
    summary = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)
    tried = [(trial.changed, trial.kind) for trial in made_bench.trials if trial.kind is Kind.check]
    with_remedy = {"optimizer.implementation": "fused"}
    assert [changed for changed, _ in tried] == [with_remedy, {}, {}, with_remedy]
    finding = summary["explanation"]["explained"][0]["findings"][0]
    assert finding["gain"]["kind"] == "measured"
    assert finding["gain"]["mid"] == pytest.approx(0.216, abs=0.05)  # less than 30 %, because loading takes time, too
    assert finding["check"]["predicted"]["kind"] == "predicted"
    assert summary["explanation"]["accuracy"] == {"checked": 1, "held": 1}


def test_pass_with_much_slower_steps_than_the_trial_is_repeated_once(bench, tiny):
    ran = []

    def slow_at_first(which, knobs):
        ran.append(which)
        return (
            [made.lines(WASTE, seconds=50 * 100.0)] if which == "lines" and ran.count("lines") == 1 else documents(which, knobs)
        )

    made_bench = bench(Surface(documents=slow_at_first), *tiny, minutes=2)
    made_bench.run()
    entry = explain(made_bench, trial=0, passes=("lines",), minutes=0.0)["explanation"]["explained"][0]
    assert passes(made_bench) == [(0, "lines"), (0, "lines")]
    assert [finding["cause"] for finding in entry["findings"]] == ["Python in the step"]


@pytest.mark.thorough
def test_uncertain_check_is_repeated_in_the_remaining_time(bench, tiny):
    made_bench = bench(Surface(documents=fused, gains=FASTER, observed=OBSERVED, noise_frac=0.06), *tiny, minutes=2)
    made_bench.run()
    summary = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)
    check = summary["explanation"]["explained"][0]["findings"][0]["check"]
    trials = [trial for trial in made_bench.trials if trial.kind is Kind.check]
    assert check["num_pairs"] == len(trials) / 2 > 2
    gain = Gain(**check["measured"])
    assert gain.width <= WIDE_FRAC or check["num_pairs"] == MAX_PAIRS
    assert summary["explanation"]["accuracy"]["checked"] == 1


@pytest.mark.thorough
def test_pairs_of_an_earlier_explain_call_count(bench, tiny):
    made_bench = bench(Surface(documents=fused, gains=FASTER, observed=OBSERVED, noise_frac=0.06), *tiny, minutes=2)
    made_bench.run()
    nums = []
    for minutes in (1.5, 60.0):
        summary = explain(made_bench, trial=0, passes=("lines",), minutes=minutes)
        nums.append(summary["explanation"]["explained"][0]["findings"][0]["check"]["num_pairs"])
        trials = [trial for trial in made_bench.trials if trial.kind is Kind.check]
        assert nums[-1] == len(trials) / 2
    assert nums[0] == 2 < nums[1]
    assert summary["explanation"]["accuracy"]["checked"] == 1


def test_finished_checks_are_kept_when_the_user_stops_explain(bench, tiny):
    made_bench = bench(Surface(documents=fused, gains=FASTER, observed=OBSERVED, noise_frac=0.06), *tiny, minutes=2)
    made_bench.run()
    stopped = made_bench.folder.next_number() + 1 + len(ORDER) + 1  # in the second round: after the pass and the first round

    made_bench.surface.failures = lambda trial, knobs: Failure(raises=KeyboardInterrupt) if trial == stopped else None
    with pytest.raises(KeyboardInterrupt):
        explain(made_bench, trial=0, passes=("lines",), minutes=60.0)
    assert made_bench.folder.read_summary()["explanation"]["explained"][0]["findings"][0]["check"]["num_pairs"] == 2


def decoding(which, knobs):
    """Returns the documents of a program whose training thread decodes for a third of the step."""
    stages = (made.stage("decode", 0.001, where=MAIN),)
    return [made.lines(stages=stages, wait_s=0.03, phases_s=made.phases(input=0.03))] if which == "lines" else []


def decode_of(summary):
    findings = summary["explanation"]["explained"][0]["findings"]
    return next(finding for finding in findings if finding["cause"] == "slow decode")


def test_a_slow_stage_is_measured_by_leaving_it_out(bench, tiny):
    made_bench = bench(
        Surface(documents=decoding, without=lambda stages: 1.5 if stages == ["decode"] else 1.0), *tiny, minutes=2
    )
    made_bench.run()
    summary = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)
    tried = [trial for trial in made_bench.trials if trial.kind is Kind.check and trial.origin == "slow decode"]
    assert [trial.evidence.get("skipped") for trial in tried] == [["decode"], None, None, ["decode"]]
    assert {trial.why for trial in tried} == {"slow decode: without it", "slow decode: as it was"}
    assert {configuration_key(trial.changed) for trial in tried} == {configuration_key({})}
    finding = decode_of(summary)
    check = finding["check"]
    assert check["how"] == "pairs without it"
    assert check["measured"]["mid"] == pytest.approx(0.5, abs=0.05)
    assert finding["gain"]["mid"] == pytest.approx(1 / (1 - 0.8 / 3) - 1, abs=0.05)  # a fifth of the decoding usually remains
    assert finding["gain"]["high"] == pytest.approx(check["measured"]["high"])  # rounding differs between instruction sets
    assert size_text(finding).endswith(f"; without it, {gain_text(check['measured'])}")
    again = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)  # repeats no measurement
    assert decode_of(again) == finding
    assert len([trial for trial in made_bench.trials if trial.kind is Kind.check and trial.origin == "slow decode"]) == 4


def test_failure_of_a_trial_that_skips_a_stage_is_noted_and_not_repeated(bench, tiny):
    failing = []
    error = {"type": "RuntimeError", "message": "decode cannot be skipped", "traceback": "..."}
    surface = Surface(documents=decoding, failures=lambda trial, _: Failure(error=error) if failing else None)
    made_bench = bench(surface, *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("lines",), minutes=0.0)
    failing.append(True)
    for _ in range(2):
        explained = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)["explanation"]["explained"][0]
        tried = [trial for trial in made_bench.trials if trial.evidence.get("skipped") == ["decode"]]
        assert [trial.outcome for trial in tried] == [Outcome.error]
        said = [note for note in explained["notes"] if note.startswith("slow decode: ")]
        assert said == [
            f"slow decode: not measured without decode, because trial {tried[0].number} ended as error ({tried[0].reason})"
        ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("failure", "outcome"),
    [(OUT_OF_MEMORY, "device_oom"), *more((Failure(cause="deadline"), "timeout"), (Failure(signal="SIGSEGV"), "crash"))],
)
def test_failed_check_is_repeated_only_on_request_or_after_the_program_changed(bench, tiny, tmp_path, failure, outcome):
    program = tmp_path / "data.py"
    program.touch()

    def of_the_program(which, knobs):
        stages = (made.stage("decode", 0.001, where=MAIN, file=str(program)),)
        return [made.lines(stages=stages, wait_s=0.03, phases_s=made.phases(input=0.03))] if which == "lines" else []

    failing = []
    surface = Surface(documents=of_the_program, failures=lambda trial, _: failure if failing else None)
    made_bench = bench(surface, *tiny, minutes=2)
    made_bench.run()
    os.utime(program, (0.0, made_bench.clock.time()))
    explain(made_bench, trial=0, passes=("lines",), minutes=0.0)
    failing.append(True)

    def tried(**wanted):
        entry = explain(made_bench, trial=0, passes=("lines",), minutes=60.0, **wanted)["explanation"]["explained"][0]
        trials = [trial for trial in made_bench.trials if trial.evidence.get("skipped") == ["decode"]]
        said = [note for note in entry["notes"] if note.startswith("slow decode: ")]
        assert len(said) == 1
        assert f"because trial {trials[-1].number} ended as {outcome}" in said[0]
        command = re.escape(f"autotune explain {call(made_bench.folder)} --trial 0 --minutes ")
        assert re.search(rf"; `{command}\d+ --retry` tries it again$", said[0])  # with --minutes, because a retry takes time
        return len(trials)

    assert [tried(), tried(), tried(is_retrying=True), tried()] == [1, 1, 2, 2]
    os.utime(program, (0.0, made_bench.clock.time()))  # the user has changed the program
    assert [tried(), tried()] == [3, 3]


@pytest.mark.thorough
def test_functions_in_files_of_the_same_name_are_measured_separately(bench, tiny):
    def in_both(which, knobs):
        lines = [
            made.line("total += sum(range(n))", seconds, function="load", file=f"/home/me/src/{name}/data.py")
            for name, seconds in (("a", 0.03), ("b", 0.02))
        ]
        return [made.lines(*lines)] if which == "lines" else []

    surface = Surface(documents=in_both, without=lambda stages: 1.4 if "/a/" in str(stages) else 1.2 if stages else 1.0)
    made_bench = bench(surface, *tiny, minutes=2)
    made_bench.run()
    for _ in range(2):
        explanation = explain(made_bench, trial=0, passes=("lines",), minutes=600.0)["explanation"]
        found = {check["where"].rpartition("/")[0][-1]: check["measured"]["mid"] for check in explanation["checks"]}
        assert found == {"a": pytest.approx(0.4, abs=0.05), "b": pytest.approx(0.2, abs=0.05)}
        assert len({check["remedy"] for check in explanation["checks"]}) == 2
        assert {one["without"]["function"].rpartition(": ")[0] for one in explanation["explained"][0]["findings"]} == {
            "/home/me/src/a/data.py",
            "/home/me/src/b/data.py",
        }
    assert len([trial for trial in made_bench.trials if trial.kind is Kind.check]) == 8


def test_function_that_cannot_be_skipped_is_reported_without_a_trial(bench, tiny):
    line = made.line("total += sum(range(n))", 0.03, function="main.<locals>.watch")
    made_bench = bench(Surface(documents=lambda which, knobs: [made.lines(line)] if which == "lines" else []), *tiny, minutes=2)
    made_bench.run()
    explained = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)["explanation"]["explained"][0]
    assert explained["notes"] == [
        "Python in the step: cannot be skipped to measure what it costs: main.<locals>.watch is defined inside another function"
    ]
    assert Kind.check not in kinds(made_bench)


@pytest.mark.thorough
def test_earlier_checks_do_not_count_against_the_limit_of_checks(bench, tiny, monkeypatch):
    gain = Gain(low=0.1, mid=0.5, high=0.9, kind="predicted")
    causes = [f"cause {number}" for number in range(MAX_CHECKS + 1)]
    made_up = [
        Finding(cause=cause, where="", evidence="", gain=gain, basis="", without=Without(
            stages=(f"transform: {cause}",), gain=gain, remaining=(0.5, 0.1, 0.0)
        ))
        for cause in causes
    ]  # fmt: skip
    monkeypatch.setattr(findings, "RULES", {"made up": lambda evidence: made_up})
    made_bench = bench(Surface(documents=documents, without=lambda stages: 1.5 if stages else 1.0), *tiny, minutes=2)
    made_bench.run()
    for num in (MAX_CHECKS, MAX_CHECKS + 1):
        made = explain(made_bench, trial=0, passes=("lines",), minutes=600.0)["explanation"]["checks"]
        assert [check["cause"] for check in made] == causes[:num]


def test_nonfinite_loss_with_a_skipped_stage_does_not_count_as_the_programs_own():
    record = a_trial(7, kind=Kind.check, evidence={NOT_FINITE: {LOSS: "step 3"}})
    assert excused([record]) == {LOSS}
    record.evidence["skipped"] = ["item"]
    assert not excused([record])
    assert not caveat([record])


def test_stage_that_gains_nothing_when_skipped_is_not_a_finding(bench, tiny):
    made_bench = bench(Surface(documents=decoding), *tiny, minutes=2)
    made_bench.run()
    explanation = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)["explanation"]
    assert "slow decode" not in [finding["cause"] for finding in explanation["explained"][0]["findings"]]
    assert [check["remedy"] for check in explanation["checks"] if check["cause"] == "slow decode"] == ["without decode"]


def test_gain_of_a_fixed_program_is_compared_with_the_predicted_gain(bench, tiny):
    made_bench = bench(Surface(documents=decoding, without=lambda stages: 1.5 if stages else 1.0), *tiny, minutes=2)
    made_bench.run()
    predicted = decode_of(explain(made_bench, trial=0, passes=("lines",), minutes=60.0))["gain"]
    number = 1 + [one["cause"] for one in made_bench.folder.read_explanation()["explained"][0]["findings"]].index("slow decode")
    fixed = CommandTemplate(parts=["python", "fixed.py"])
    summary = explain(made_bench, trial=0, fixed=fixed, finding=number)
    check = decode_of(summary)["check"]
    assert (check["how"], check["predicted"]) == ("fixed program", predicted)


def test_check_of_a_compile_setting_has_extra_time_to_compile(bench, tiny, monkeypatch):
    predicted = Gain(low=0.1, mid=0.5, high=0.9, kind="predicted")
    finding = Finding(
        cause="launch-bound", where="forward", evidence="", gain=predicted, basis="", knob=COMPILE, value="default"
    )
    monkeypatch.setattr(findings, "RULES", {"launch-bound": lambda evidence: [finding]})
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("lines",), minutes=60.0)
    limits_s = [launch.deadlines.total_s for launch in made_bench.launcher.launches[-4:]]
    with_remedy, without = limits_s[:2]
    assert with_remedy == pytest.approx(without + OVERRUN_FACTOR * COMPILE_S, rel=0.2)


def test_setting_that_gains_nothing_is_dropped_and_counted_as_a_wrong_prediction(bench, tiny):
    made_bench = bench(Surface(documents=fused, observed=OBSERVED), *tiny, minutes=2)
    made_bench.run()
    explanation = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)["explanation"]
    assert explanation["explained"][0]["findings"] == []
    assert explanation["accuracy"] == {"checked": 1, "held": 0}


def test_no_check_starts_without_time_for_it(bench, tiny):
    made_bench = bench(Surface(documents=fused, gains=FASTER, observed=OBSERVED), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("lines",), minutes=0.0)
    assert Kind.check not in kinds(made_bench)
    notes = made_bench.folder.read_explanation()["explained"][0]["notes"]
    assert any(note.startswith("unfused optimizer: not tried") for note in notes)


def test_setting_tried_in_the_search_is_checked_with_the_trials_of_the_search(bench, tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("optimizer.implementation: [default, fused]\nloader.num_workers: [0, 2]\n")
    surface = Surface(documents=fused, gains=FASTER, observed=OBSERVED)
    made_bench = bench(surface, f"search_space={file}", minutes=2)
    made_bench.run()
    explanation = explain(made_bench, trial=0, passes=("lines",), minutes=0.0)["explanation"]
    assert [check["how"] for check in explanation["checks"]] == ["trials of this study"]
    assert explanation["checks"][0]["predicted"]["kind"] == "predicted"  # from the rule, not from the trials
    assert explanation["explained"][0]["findings"][0]["gain"]["mid"] == pytest.approx(0.216, abs=0.06)


def test_fixed_and_original_program_are_measured_alternately(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, passes=("lines",))
    fixed = CommandTemplate(parts=["python", "-c", "print()"])
    explanation = explain(made_bench, fixed=fixed, pairs=4)["explanation"]
    launched = [launch.argv for launch in made_bench.launcher.launches[-8:]]
    assert [argv == ["python", "-c", "print()"] for argv in launched] == 2 * [True, False, False, True]
    check = explanation["checks"][0]
    assert (check["how"], check["num_pairs"], check["held"]) == ("fixed program", 4, False)
    assert check["remedy"] == "python -c 'print()'"
    assert check["measured"]["mid"] == pytest.approx(0.0, abs=0.03)  # the corrected program is just as fast


def test_finished_pairs_of_a_fixed_program_count_when_the_user_stops_explain(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("lines",), minutes=0.0)
    stopped = made_bench.folder.next_number() + len(ORDER) + 1
    made_bench.surface.failures = lambda trial, knobs: Failure(raises=KeyboardInterrupt) if trial == stopped else None
    with pytest.raises(KeyboardInterrupt):
        explain(made_bench, trial=0, fixed=CommandTemplate(parts=["python", "fixed.py"]), pairs=8)
    (check,) = made_bench.folder.read_summary()["explanation"]["checks"]
    assert (check["how"], check["num_pairs"]) == ("fixed program", 2)


def test_fixed_program_is_refused_if_there_is_no_finding_to_fix(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    document = explain(made_bench, passes=("lines",))["explanation"]
    document["explained"][0]["findings"] = []
    made_bench.folder.write_explanation(document)
    with pytest.raises(BadInput, match=r"^--fixed: explaining trial [0-9]+ found nothing"):
        explain(made_bench, fixed=CommandTemplate(parts=["python", "fixed.py"]))


def test_trials_of_a_fixed_program_are_marked_and_its_gain_is_reported_separately(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    before = explain(made_bench, trial=0, passes=("lines",), minutes=0.0)["explanation"]
    explanation = explain(made_bench, trial=0, fixed=CommandTemplate(parts=["python", "fixed.py"]), pairs=2)["explanation"]
    tried = [trial for trial in made_bench.trials if trial.kind is Kind.check]
    assert [trial.is_of_program for trial in tried] == [False, True, True, False]
    finding, was = (one["explained"][0]["findings"][0] for one in (explanation, before))
    measured = gain_text(finding["check"]["measured"])
    assert size_text(finding) == f"{gain_text(was['gain'])}; with the corrected program, {measured}"
    assert explanation["accuracy"] == {"checked": 0, "held": 0}  # the fix may not have removed the cause


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"trial": 99}, "no such trial"),
        ({"fixed": CommandTemplate(parts=["true"])}, "was not explained yet"),
    ],
)
def test_explain_refuses_an_unknown_trial_and_a_fix_without_an_explanation(wanted, said, bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    with pytest.raises(BadInput, match=said):
        explain(made_bench, **wanted)


def test_explain_refuses_a_trial_without_a_measurement_and_lists_those_with_one(bench, tiny):
    surface = Surface(documents=documents, failures=lambda trial, _: OUT_OF_MEMORY if trial == 2 else None)
    made_bench = bench(surface, *tiny, minutes=2)
    made_bench.run()
    with pytest.raises(BadInput, match=r"it ended as .*_oom.* Can be explained: 0, 1"):
        explain(made_bench, trial=2)


def test_explain_accepts_a_winner_that_attribution_measured_first(tmp_path):
    kinds = [Kind.baseline, Kind.search, Kind.attribution, Kind.final, Kind.parity]
    records = [a_trial(n, kind=kind, value=10.0, repeats=2 if n == 3 else None) for n, kind in enumerate(kinds)]
    summary, folder = {"best": {"trial": 2}}, StudyFolder(tmp_path / "s")
    assert explainable(None, records, summary, folder) == (records[2], "best")
    with pytest.raises(BadInput, match="trial 3 only repeats trial 2"):
        explainable(3, records, summary, folder)
    with pytest.raises(BadInput, match="trial 4 is of kind parity, which has no configuration of its own"):
        explainable(4, records, summary, folder)
    with pytest.raises(
        BadInput, match=r"^STUDY: none of its trials has a measurement to explain, got 's'\. Continue it: "
    ) as told:
        explainable(None, records[3:], {}, folder)
    assert str(told.value).endswith(call(folder))


@pytest.mark.thorough
def test_unreadable_document_gives_a_note(bench, tiny):
    made_bench = bench(Surface(documents=documents), *tiny, minutes=2)
    made_bench.run()
    explain(made_bench, trial=0, passes=("lines",), minutes=0.0)
    number = next(trial.number for trial in made_bench.trials if trial.kind is Kind.explain)
    (made_bench.folder.trial_path(number) / "explained.lines.rank0.json").write_text('{"rank": 0')
    entry = explain(made_bench, trial=0, passes=("lines",), minutes=0.0)["explanation"]["explained"][0]
    assert entry["findings"] == []
    assert entry["notes"][0].startswith("lines: not known, rank 0: explained.lines.rank0.json: not JSON, or cut short")


@pytest.mark.thorough
def test_study_of_a_slow_program_has_time_for_a_pass_that_ends_after_few_steps(bench, tiny):
    slow = Surface(documents=documents, step_s=lambda knobs: 2.2, start_s=6.0)
    one = bench(slow, AUTO, *tiny, minutes=8)
    assert one.run()["status"] == "complete"
    assert [which for _, which in passes(one)][:1] == ["lines"]


def test_setting_that_fails_its_check_is_no_longer_advised(bench, tiny):
    def failures(trial, knobs):
        return Failure(cause="hang", log_tail="") if knobs.get("optimizer.implementation") == "fused" else None

    made_bench = bench(Surface(documents=fused, observed=OBSERVED, failures=failures), *tiny, minutes=2)
    made_bench.run()
    explanation = explain(made_bench, trial=0, passes=("lines",), minutes=60.0)["explanation"]
    tried = [trial for trial in made_bench.trials if trial.kind is Kind.check]
    assert [trial.outcome.may_win for trial in tried] == [False]  # a failure ends the round
    assert explanation["explained"][0]["findings"] == []
    assert explanation["checks"] == []


def an_entry(trial, role):
    return {"trial": trial, "role": role, "passes": {}, "phases_s": {}, "findings": [], "notes": []}


@pytest.mark.parametrize("fault", [Ending("train.py was edited"), NoNode("launch.queue_minutes: no node"), KeyboardInterrupt()])
def test_study_is_complete_even_if_its_passes_cannot_run(bench, tiny, monkeypatch, fault):
    def fails(*_):
        raise fault

    monkeypatch.setattr(Explaining, "run", fails)
    study = bench(None, "explain.auto=true", *tiny)
    assert study.run()["status"] == "complete"
    said = [line for line in study.listener.named("notice") if line.startswith("Not everything was explained: ")]
    assert [line.partition(": ")[2] for line in said] == ([str(fault)] if str(fault) else [])


@pytest.mark.parametrize("is_asked", [False, True])
def test_pass_that_runs_when_the_summary_is_interrupted_is_recorded(bench, tiny, monkeypatch, is_asked):
    study = bench(Surface(documents=documents), f"explain.auto={str(not is_asked).lower()}", *tiny, minutes=20)
    if is_asked:
        study.run()
    due = Writer.write_when_due

    def interrupted(*arguments):
        if any(running._launch.spec.mode == "explain" for running in study.launcher.running):
            raise KeyboardInterrupt
        due(*arguments)

    monkeypatch.setattr(Writer, "write_when_due", interrupted)
    if is_asked:
        with pytest.raises(KeyboardInterrupt):
            explain(study)
    else:
        assert study.run()["status"] == "complete"
    assert (study.trials[-1].kind, study.trials[-1].outcome) == (Kind.explain, Outcome.interrupted)
    assert study.folder.read_cut_off() == []


def test_what_was_explained_before_a_resume_is_kept_if_there_is_no_time_for_more(bench, tiny):
    made_bench = bench(Surface(documents=documents), AUTO, *tiny, minutes=1)
    made_bench.run()
    before = {**empty(), "explained": [an_entry(77, "best"), an_entry(78, "asked")]}
    made_bench.folder.write_explanation(before)
    after = resume_study(made_bench.inputs, made_bench.folder, made_bench.listener)["explanation"]
    roles = [(one["trial"], one["role"]) for one in after["explained"]]
    assert roles == [(77, "asked"), (78, "asked")], "another trial is the best now"


@pytest.mark.parametrize("entries", [[3], [{"trial": 3}], [{**an_entry(3, "best"), "findings": [{"cause": "slow"}]}]])
def test_damaged_explanation_counts_as_missing(bench, entries):
    folder = bench().folder
    folder.write_explanation({**empty(), "explained": entries})
    assert folder.read_explanation() is None
    folder.write_explanation({**empty(), "explained": [an_entry(3, "best")]})
    assert folder.read_explanation()["explained"][0]["trial"] == 3
