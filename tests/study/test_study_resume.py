"""Resumes studies from copies of their folders, taken at different moments, as if the study had been killed then."""

import contextlib
import dataclasses
import functools
import json
import shutil

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.compare.decision import by_round
from autotune.config.recorded import recorded
from autotune.errors import BadInput, NothingWorked
from autotune.records import REPORTED, Kind, Outcome
from autotune.run_dir import StudyFolder
from autotune.study import resume_study
from autotune.study.proposals import NO_IMPROVEMENT
from autotune.study.resuming import read_earlier
from tests.study.conftest import MACHINE, RATES
from tests.support.fake_launcher import Failure, Surface
from tests.support.rows import more

FAST = {("precision.amp", "bf16"): 1.8, ("layout.channels_last", True): 1.3, ("threads.intra", 4): 1.2}
QUICK = ("compile.mode=off", "study.budget.trials=5")


class Killed(BaseException):
    """Ends a study of which the rest is not needed."""


class Cut:
    """Copies the study's folder at the n-th event of a kind, to get what a SIGKILL would leave at that moment.

    With `why`, only events of trials with that reason count. With `is_last`, the study ends there.
    """

    def __init__(self, study, event, number, place, why="", *, is_last=False):
        self.study, self.event, self.number, self.place, self.seen = study, event, number, place, 0
        told = getattr(study.listener, event)

        def heard(*arguments):
            told(*arguments)
            self.seen += why in repr(arguments)
            if self.seen == number and not place.exists():
                shutil.copytree(study.folder.path, place)
                if is_last:
                    raise Killed

        setattr(study.listener, event, heard)


@pytest.fixture
def bench(bench):
    return functools.partial(bench, is_kept=True)


@pytest.fixture
def study(bench):
    return bench(Surface(gains=FAST), *QUICK)


def killed(study, tmp_path, event="trial_started", number=5, why="", *, is_last=True):
    """Runs a study up to the n-th event, or to its end if not `is_last`; returns the folder as it was at the n-th event."""
    place = tmp_path / "copies" / f"{event}{number}" / "s"
    Cut(study, event, number, place, why, is_last=is_last)
    with contextlib.suppress(Killed):
        study.run()
    assert place.exists(), "the study has no such moment"
    return StudyFolder(place)


def resume(study, folder, *overrides, **inputs):
    """Resumes a study from a folder with the same program on the same machine, as `autotune resume` does."""
    composed = recorded(folder.read_study(), folder.config_file, overrides)
    study.inputs = dataclasses.replace(
        study.inputs, config=composed.config, yaml=composed.yaml, space=composed.space, command=composed.command, **inputs
    )
    study.folder = folder
    study.listener.calls.clear()
    study.launcher.launches.clear()
    study.launcher.running.clear()
    return resume_study(study.inputs, folder, study.listener)


def told(folder):
    """Returns the trials in Optuna's journal."""
    storage = JournalStorage(JournalFileBackend(str(folder.journal_file)))
    return optuna.load_study(study_name=folder.name, storage=storage).get_trials()


def searched(trials):
    kinds = (Kind.baseline, Kind.search)
    return [trial for trial in trials if trial.kind in kinds and trial.outcome is not Outcome.interrupted]


MOMENTS = [
    ("started", 1), ("trial_ended", 1), ("trial_started", 4), ("finals_started", 1), ("trial_ended", 8), ("trial_started", 11),
    ("finished", 1),
]  # fmt: skip


@pytest.mark.parametrize(("event", "number"), [*MOMENTS[1:5], *more(MOMENTS[0], *MOMENTS[5:])])
def test_study_killed_at_any_moment_resumes_without_loss_or_repetition(bench, tmp_path, event, number):
    study = bench(Surface(gains=FAST, max_batch=64), *QUICK, minutes=4)
    folder = killed(study, tmp_path, event, number)
    before = {trial.number: trial for trial in folder.read_trials()}
    summary = resume(study, folder)
    trials = folder.read_trials()
    assert summary["status"] == "complete"
    assert summary["speedup"]["verdict"] == "faster"
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert all(trials[number] == trial for number, trial in before.items() if number), "a record has changed"
    assert not {launch.spec.trial for launch in study.launcher.launches} & set(before), "a finished trial ran again"
    configurations = [tuple(sorted(trial.changed.items())) for trial in searched(trials)]
    assert len(set(configurations)) == len(configurations)
    assert len(configurations) == 6, "the trial budget counts what was tried before"
    first = [trial.number for trial in trials if trial.kind in (Kind.baseline, Kind.search)]
    assert set(first) == {trial.user_attrs["trial"] for trial in told(folder) if trial.user_attrs}
    assert all(trial.state.is_finished() for trial in told(folder))


@pytest.mark.thorough
def test_resume_names_environment_variables_that_have_changed(bench, tmp_path):
    machine = {**MACHINE, "environment": {"OMP_NUM_THREADS": "8", "OMP_PLACES": "cores"}}
    study = bench(Surface(gains=FAST), *QUICK, machine=machine)
    folder = killed(study, tmp_path)
    resume(study, folder, machine={**machine, "environment": {"OMP_PLACES": "cores"}})
    notices = [notice for notice in study.listener.named("notice") if "environment differs" in notice]
    assert len(notices) == 1
    assert "earlier trials: OMP_NUM_THREADS: was '8', is None. " in notices[0]


# From the fourth trial on. Earlier proposals draw between equally promising values, such as prefetch factors, at random.
@pytest.mark.thorough
@pytest.mark.parametrize("number", [4, *more(8, 12)])
def test_resumed_search_makes_the_same_proposals_as_without_the_kill(bench, tmp_path, number):
    surface = Surface(gains=FAST, noise_frac=0.0)
    study = bench(surface, "search.sampler=rates", "compile.mode=off", "study.budget.trials=14", minutes=30)
    folder = killed(study, tmp_path, "trial_ended", number, is_last=False)
    whole = [trial.changed for trial in searched(study.trials)]
    resume(study, folder)
    assert [trial.changed for trial in searched(folder.read_trials())] == whole


def test_trial_cut_off_by_the_kill_is_recorded_as_interrupted_and_repeated_first(study, tmp_path):
    folder = killed(study, tmp_path, "trial_started", 5)
    (asked,) = folder.read_cut_off()
    resume(study, folder)
    trials = folder.read_trials()
    assert trials[4].outcome is Outcome.interrupted
    assert "cut off" in trials[4].reason
    assert (trials[5].changed, trials[5].origin) == (asked.changed, asked.origin)
    assert "again: trial 4 was not finished" in trials[5].why


@pytest.mark.thorough
def test_configuration_during_which_autotune_was_killed_twice_is_not_tried_again(study, tmp_path):
    folder = killed(study, tmp_path, "trial_started", 3)
    (asked,) = folder.read_cut_off()
    again = StudyFolder(tmp_path / "again" / "s")
    Cut(study, "trial_started", 1, again.path)
    study.folder = folder
    resume(study, folder)  # copies the folder during the first trial, which repeats the configuration
    resume(study, again)
    changes = [trial.changed for trial in again.read_trials() if trial.changed == asked.changed]
    assert len(changes) == 2
    assert any("Not tried again" in line for line in study.listener.named("notice"))


def test_resumed_study_reuses_the_baseline_and_its_facts(study, tmp_path):
    folder = killed(study, tmp_path, "trial_started", 4)
    about, baseline = folder.read_study(), folder.read_trials()[0]
    resume(study, folder)
    assert study.launcher.launches[0].spec.trial == 4
    assert study.launcher.launches[0].spec.target == [{"site": "train.py:1", "ordinal": 0}]
    after = folder.read_study()
    assert folder.read_trials()[0] == baseline
    for name in ("identity", "fingerprint", "space", "asked", "started_at", "sequence", "base", "command", "versions"):
        assert getattr(after, name) == getattr(about, name), name


@pytest.mark.parametrize("damage", ["record missing", *more("result missing", "result damaged")])
def test_unusable_baseline_is_measured_again_and_other_trials_still_count(study, tmp_path, damage):
    folder = killed(study, tmp_path, "trial_started", 4)
    if damage == "record missing":
        (folder.trial_path(0) / "trial.json").unlink()
    elif damage == "result missing":
        (folder.trial_path(0) / "result.rank0.json").unlink()
    else:
        (folder.trial_path(0) / "result.rank0.json").write_text('{"schema": 1, "trial"')
    summary = resume(study, folder)
    numbers = [launch.spec.trial for launch in study.launcher.launches]
    assert numbers[0] == 0
    assert min(numbers[1:]) == 4
    assert summary["status"] == "complete"
    assert any("baseline is measured again" in line for line in study.listener.named("notice"))


def failed_once(bench):
    """Returns a study that ended because its program failed. From now on, the program trains."""
    error = {"type": "ValueError", "message": "bad shape", "traceback": "ValueError: bad shape"}
    study = bench(Surface(gains=FAST, failures=lambda trial, knobs: Failure(error=error)), *QUICK)
    with pytest.raises(NothingWorked):
        study.run()
    study.surface.failures = lambda trial, knobs: None
    return study


def test_study_whose_program_failed_can_be_resumed_once_the_program_trains(bench, tmp_path):
    study = failed_once(bench)
    summary = resume(study, study.folder)
    assert summary["status"] == "complete"
    assert study.trials[0].evidence["earlier_run"]["outcome"] == "error"


def test_baseline_that_is_cut_off_when_measured_again_counts_as_cut_off(bench, tmp_path):
    study = failed_once(bench)
    Cut(study, "trial_started", 1, place := tmp_path / "again" / "s")
    resume(study, study.folder)
    assert [asked.number for asked in StudyFolder(place).read_cut_off()] == [0]
    assert StudyFolder(place).read_trials() == []


def test_resumed_study_counts_the_time_used_before(bench, tmp_path):
    study = bench(Surface(gains=FAST, start_s=6.0, window_s=8.0), "compile.mode=off", minutes=8)
    folder = killed(study, tmp_path, "trial_ended", 12)
    spent_s = folder.read_summary()["seconds"]["total"]
    assert spent_s > 120
    began_s = study.clock.now_s
    summary = resume(study, folder)
    assert study.clock.now_s - began_s <= (480 - spent_s) * 1.1
    assert summary["seconds"]["total"] == pytest.approx(spent_s + study.clock.now_s - began_s, abs=15)


@pytest.mark.parametrize("begun_s", [2.0, 1e9], ids=["before now", "after now: by the clock of another boot"])
def test_time_of_a_baseline_that_was_cut_off_counts_once(study, tmp_path, begun_s):
    folder = study.folder = killed(study, tmp_path, "trial_started", 1)
    times = ((begun_s, "import"), (begun_s + 60.0, "steady"))
    lines = [{"time_s": at_s, "phase": phase, "step": 0} for at_s, phase in times]
    (folder.trial_path(0) / "progress.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_earlier(folder).spent_s == pytest.approx(60.0)
    again = StudyFolder(tmp_path / "again" / "s")
    Cut(study, "started", 1, again.path)
    began_s = study.clock.now_s
    assert resume(study, folder)["seconds"]["total"] == pytest.approx(60.0 + study.clock.now_s - began_s, abs=1.0)
    assert read_earlier(again).spent_s == pytest.approx(60.0), "killed again before the baseline began"


def test_complete_study_continues_with_a_larger_budget(bench):
    study = bench(Surface(gains=FAST, start_s=6.0, window_s=8.0), "compile.mode=off", minutes=4)
    before = study.run()
    summary = resume(study, study.folder, "study.budget.minutes=12")
    assert summary["status"] == "complete"
    assert len(summary["trials"]) > len(before["trials"]) + 10
    assert summary["budget_s"] == 720
    assert "minutes: 12" in study.folder.config_file.read_text()


def test_study_interrupted_in_the_finals_searches_again_only_with_a_larger_budget(bench, tmp_path):
    """A search that had ended with time left tried up to five more configurations, which could become finalists."""

    def failures(number, knobs):
        num_finals = sum(kind is Kind.final for _, kind, *_ in study.listener.named("trial_started"))
        return Failure(raises=KeyboardInterrupt) if num_finals == 3 and not stopped and not stopped.append(number) else None

    stopped, file = [], tmp_path / "space.yaml"
    file.write_text("loader.batch_size: [16, 32, 64, 128]\nprecision.amp: auto\nthreads.intra: [1, 2, 4]\n")
    surface = Surface(gains=FAST, loader_per_s=1e6, noise_frac=0.002, half_batch=2.0, failures=failures)
    study = bench(surface, RATES, f"search_space={file}", minutes=120)
    assert study.run()["status"] == "interrupted"
    num = len(searched(study.trials))
    summary = resume(study, study.folder)
    assert (summary["status"], summary["reason"]) == ("complete", NO_IMPROVEMENT)
    assert len(searched(study.trials)) == num
    resume(study, study.folder, "study.budget.minutes=240")
    assert len(searched(study.trials)) > num


@pytest.mark.thorough
def test_final_rounds_before_the_kill_count_if_the_finalists_are_the_same(bench, tmp_path):
    study = bench(Surface(gains=FAST, start_s=1.0, window_s=3.0), *QUICK)
    folder = killed(study, tmp_path, "trial_ended", 4, why=REPORTED)
    pairs = [one for one in by_round(folder.read_trials(), REPORTED) if len(one) == 2]
    assert pairs, "the kill came before a reported pair was complete"
    summary = resume(study, folder)
    chosen = summary["best"]["trial"]
    kept = {trial.number for one in pairs for trial in one.values()}
    whole = [one for one in by_round(folder.read_trials(), REPORTED) if set(one) == {0, chosen}]
    assert summary["speedup"]["num_rounds"] == len(whole), "every pair counts, also those from before the kill"
    assert kept <= {trial.number for one in whole for trial in one.values()}
    turns = [(trial.round, trial.repeats) for trial in folder.read_trials() if trial.kind is Kind.final]
    assert len(set(turns)) == len(turns)


def test_missing_half_of_a_pair_is_not_measured_later_alone(bench, tmp_path):
    study = bench(Surface(gains=FAST, start_s=1.0, window_s=3.0), *QUICK)
    folder = killed(study, tmp_path, "trial_started", 4, why=REPORTED)
    (lonely,) = (trial for one in by_round(folder.read_trials(), REPORTED) if len(one) == 1 for trial in one.values())
    resume(study, folder)
    finals = [t for t in folder.read_trials() if t.kind is Kind.final and t.outcome is not Outcome.interrupted]
    later = [trial for trial in finals if trial.round == lonely.round]
    assert later == [lonely], "the missing half was measured alone, long after the first half"


@pytest.mark.thorough
def test_final_rounds_of_other_finalists_do_not_count_and_a_notice_says_so(bench):
    study = bench(Surface(gains=FAST, noise_frac=0.001), "compile.mode=off", "study.budget.trials=2", minutes=20)
    study.run()
    first = [trial.number for trial in study.trials if trial.kind is Kind.final]
    summary = resume(study, study.folder, "study.budget.trials=14")
    assert any(f"trials {first[0]} to {first[-1]}) do not count" in line for line in study.listener.named("notice"))
    values = [t.value for t in study.trials if t.repeats == summary["best"]["trial"] and t.number > first[-1]]
    assert min(values) <= summary["best"]["value"] <= max(values)


DIFFERENT = [
    ({"cpu_model": "Another CPU"}, "machine.cpu_model: was 'Fake CPU', is 'Another CPU'"),
    ({"num_cores": 2}, "machine.num_cores: was 4, is 2"),
    ({"gpus": [{"name": "H200", "memory_bytes": 1}]}, "machine.gpus: was [], is ['H200']"),
]


@pytest.mark.parametrize(("change", "words"), DIFFERENT)
def test_resume_on_another_machine_is_refused_without_changing_any_file(study, tmp_path, change, words):
    folder = killed(study, tmp_path)
    before = {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file() and file.name != "owner.json"}
    with pytest.raises(BadInput) as refused:
        resume(study, folder, machine={**study.inputs.machine, **change})
    assert words in str(refused.value)
    assert "start a new study" in str(refused.value)
    assert {file: file.read_bytes() for file in before} == before
    assert not study.launcher.launches


def test_resume_with_another_torch_is_refused_at_the_first_trial(study, tmp_path):
    folder = killed(study, tmp_path)
    num_before = len(folder.read_trials())
    study.surface.facts = {**study.surface.facts, "torch": "2.15.0"}
    with pytest.raises(BadInput, match=r"got torch '2\.15\.0' instead of '2\.14\.1'"):
        resume(study, folder)
    assert len(study.launcher.launches) == 1
    assert len(folder.read_trials()) == num_before + 1, "the trial that was cut off is recorded, too"
    assert study.launcher.is_closed


def test_damaged_record_is_named_and_the_study_resumes_without_that_trial(study, tmp_path):
    folder = killed(study, tmp_path)
    (folder.trial_path(2) / "trial.json").write_text("{")
    with pytest.raises(BadInput, match=r"trials/0002/trial\.json: .*Move that trial's folder away"):
        resume(study, folder)
    folder.trial_path(2).rename(tmp_path / "away")
    assert resume(study, folder)["status"] == "complete"


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("lr = 0.1")
    return file


def script_study(bench, script, surface=None):
    return bench(surface or Surface(gains=FAST), *QUICK, command=("python", str(script)))


@pytest.mark.parametrize(
    ("edited", "now"), [("lr = 0.2", r"is '.*train\.py \(SHA-256 [0-9a-f]{12}\)'"), (None, r"is '.*train\.py \(not in /")]
)
def test_resume_with_an_edited_script_is_refused_and_names_the_script(bench, tmp_path, script, edited, now):
    study = script_study(bench, script)
    folder = killed(study, tmp_path)
    script.write_text(edited) if edited else script.unlink()
    with pytest.raises(BadInput, match=rf"program\.script: was '.*train\.py \(SHA-256 [0-9a-f]{{12}}\)', {now}"):
        resume_study(study.inputs, folder, study.listener)
    script.write_text("lr = 0.1")
    assert resume(study, folder)["status"] == "complete"


@pytest.mark.thorough
def test_study_of_a_version_that_did_not_record_the_script_can_be_resumed(bench, tmp_path, script):
    study = script_study(bench, script)
    folder = killed(study, tmp_path)
    about = json.loads(folder.study_file.read_text())
    del about["identity"]["program.script"]
    folder.study_file.write_text(json.dumps(about))
    assert resume(study, folder)["status"] == "complete"


def test_study_ends_before_the_next_trial_if_its_script_is_edited(bench, script):
    def failures(trial, knobs):
        if trial == 2:
            script.write_text("lr = 0.2")

    study = script_study(bench, script, Surface(gains=FAST, failures=failures))
    summary = study.run()
    assert summary["status"] == "interrupted"
    assert "train.py was edited or removed while the study ran" in summary["reason"]
    assert len(study.trials) == 3
    script.write_text("lr = 0.1")
    study.surface.failures = lambda trial, knobs: None
    assert resume(study, study.folder)["status"] == "complete"


def test_resume_with_another_search_space_is_refused_and_names_the_difference(study, tmp_path):
    folder = killed(study, tmp_path)
    about = json.loads(folder.study_file.read_text())
    about["identity"]["space.precision.amp"] = {"choice": ["off", "bf16", "fp8"]}  # as if another version had other rules
    folder.study_file.write_text(json.dumps(about))
    with pytest.raises(BadInput, match=r"space\.precision\.amp: was .*fp8.*, is "):
        resume(study, folder)


@pytest.mark.thorough
def test_study_without_measurements_can_be_resumed_on_another_machine(study, tmp_path):
    folder = killed(study, tmp_path, "trial_started", 1)
    summary = resume(study, folder, machine={**study.inputs.machine, "cpu_model": "Another CPU"})
    assert summary["status"] == "complete"
    assert summary["machine"]["cpu_model"] == "Another CPU"


def test_second_tuner_is_refused_and_the_message_names_the_first(study, tmp_path):
    folder = killed(study, tmp_path)
    with folder.claimed(), pytest.raises(BadInput, match=r"another autotune is working on it.*process \d+ on host"):
        resume(study, StudyFolder(folder.path))
    assert resume(study, StudyFolder(folder.path))["status"] == "complete"


def test_configuration_stopped_by_the_user_is_tried_again_any_number_of_times(bench):
    stop = {"at": {2}}

    def failures(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if trial in stop["at"] else None

    study = bench(Surface(gains=FAST, failures=failures), *QUICK)
    assert study.run()["status"] == "interrupted"
    wanted = study.trials[2].changed
    for number in (3, 4):
        stop["at"] = {number}
        assert resume(study, study.folder)["status"] == "interrupted"
        assert study.trials[number].changed == wanted
    stop["at"] = set()
    assert resume(study, study.folder)["status"] == "complete"
    assert study.trials[5].changed == wanted
    assert study.trials[5].outcome is Outcome.ok


@pytest.mark.thorough
def test_clock_that_is_set_back_changes_no_duration_and_no_order(study, tmp_path):
    folder = killed(study, tmp_path, "trial_ended", 4)
    study.clock.time = lambda: 1_000_000_000.0 - study.clock.now_s  # a wall clock that is years behind and runs backwards
    summary = resume(study, folder)
    trials = folder.read_trials()
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert all(trial.seconds >= 0 for trial in trials)
    assert 0 < summary["seconds"]["total"] < 4 * 60 * 1.1 + 120
    assert summary["speedup"]["verdict"] == "faster"


def test_best_yaml_is_written_before_the_status_is_complete(bench, tmp_path):
    study, place = bench(Surface(gains=FAST), *QUICK), tmp_path / "copies" / "s"
    write = study.folder.write_summary

    def written(summary):
        write(summary)
        if summary["status"] == "complete":
            shutil.copytree(study.folder.path, place)

    study.folder.write_summary = written
    study.run()
    assert StudyFolder(place).best_file.read_text() == study.folder.best_file.read_text()


def test_scratch_folder_of_a_trial_that_was_cut_off_is_removed(study, tmp_path):
    folder = killed(study, tmp_path, "trial_started", 5)
    (scratch := folder.trial_path(4) / "scratch").mkdir(parents=True)
    resume(study, folder)
    assert folder.read_trial(4).outcome is Outcome.interrupted
    assert not scratch.exists()


def test_a_study_that_has_ended_has_no_temporary_files(study):
    ended = study.listener.trial_ended

    def heard(record):
        ended(record)
        (study.folder.trial_path(record.number) / "result.rank0.json.tmp").touch()

    study.listener.trial_ended = heard
    study.run()
    assert not list(study.folder.path.rglob("*.tmp"))
