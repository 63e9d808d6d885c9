"""Studies are ended in every possible way and resumed: real processes and signals, checked through `autotune show --json`."""

import json
import os
import random
import signal
import time

import pytest

from autotune.cli.main import main
from autotune.cli.resume import _check_budget
from autotune.config.schema import Budget
from autotune.errors import BadInput
from autotune.harness.cores import num_cores
from autotune.records import Kind, Outcome
from tests.faults.quick_study import PROGRAM, QuickStudy, kill, measured

pytestmark = pytest.mark.thorough

BUDGET = ("study.budget.minutes=0.1", "compile.mode=off")


@pytest.fixture
def study(tmp_path):
    made = QuickStudy(tmp_path)
    yield made
    for process in made.processes():
        process.kill()


def test_study_killed_repeatedly_loses_and_repeats_no_trial(study):
    rng, before = random.Random(7), {}
    tuner = study.start("study.budget.trials=5", "study.budget.minutes=0.3", "compile.mode=off")
    study.wait_for_trial(0, tuner)
    num_kills = 0
    while tuner.poll() is None:
        if num_kills < 4:
            time.sleep(rng.uniform(0.0, 3.0))
            num_kills += tuner.poll() is None
            kill(tuner)
            after = {trial.number: trial for trial in study.folder.read_trials()}
            assert all(after[number] == trial for number, trial in before.items() if number), "a finished trial has changed"
            before = after
            if num_kills == 1:
                assert "to continue s  autotune resume s" in study.say("list").stdout
            tuner = study.resume("--json")
        else:
            out, err = tuner.communicate(timeout=120)
    assert tuner.returncode == 0, err
    summary = json.loads(out)
    assert summary == study.shown()
    assert (summary["status"], summary["speedup"]["verdict"]) == ("complete", "faster")
    trials = study.folder.read_trials()
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len(set(measured(trials))) == len(measured(trials)), "a trial was repeated"
    searched = [trial for trial in trials if trial.kind is Kind.search and trial.outcome is not Outcome.interrupted]
    assert len(searched) == 5
    assert num_kills == 4
    assert study.none_is_left()


@pytest.mark.parametrize(("num_presses", "is_finished"), [(1, True), (2, False)])
def test_interrupted_study_names_the_resume_command_and_can_be_resumed(study, num_presses, is_finished):
    tuner = study.start(*BUDGET)
    study.wait_for_trial(1, tuner)
    tuner.send_signal(signal.SIGINT)
    if num_presses == 2:
        assert any("Press Ctrl-C again" in line for line in tuner.stdout)  # until then, the two signals could merge
        tuner.send_signal(signal.SIGINT)
    out, err = tuner.communicate(timeout=30)
    assert tuner.returncode == 130, err
    assert "To continue: autotune resume s\n" in err
    assert "verdict  " in out
    trials = study.folder.read_trials()
    assert (trials[-1].outcome is not Outcome.interrupted) is is_finished
    assert study.none_is_left()
    assert study.folder.current_summary()["status"] == "interrupted"
    tuner = study.resume()
    out, err = tuner.communicate(timeout=60)
    assert tuner.returncode == 0, err
    assert f"resumed  {len(trials)} trials from earlier" in out
    assert len(set(measured(study.folder.read_trials()))) == len(measured(study.folder.read_trials()))


def test_second_tuner_is_refused_with_the_process_of_the_first(study):
    tuner = study.start(*BUDGET)
    study.wait_for_trial(1, tuner)
    second = study.resume()
    out, err = second.communicate(timeout=30)
    assert (second.returncode, out) == (2, "")
    assert f"another autotune is working on it, got 's' (process {tuner.pid} on host" in err
    assert tuner.poll() is None
    tuner.communicate(timeout=60)
    assert tuner.returncode == 0
    assert study.shown()["status"] == "complete"


def test_complete_study_continues_only_with_a_larger_budget(study, capsys, monkeypatch):
    tuner = study.start(*BUDGET, "study.budget.trials=2")
    tuner.communicate(timeout=60)
    monkeypatch.chdir(study.cwd)
    assert main(["resume", "s"]) == 0
    said = capsys.readouterr().out
    assert (
        "complete  the trial budget is used. To continue, give it a larger budget: autotune resume s study.budget.minutes=0.2"
        in said
    )
    assert "study.budget.trials=4" in said
    for words, problem in [
        (["study.budget.minutes=0.01"], "minutes are already used, got 0.01. Give more"),
        (["study.budget.trials=2"], "study.budget.trials: 2 trials are already used, got 2"),
        (["study.budget.trials=many"], "study.budget.trials: not a number, got 'many'"),
        (["loader.num_workers=2", "tiers=exact"], "tiers: cannot be changed in an existing study"),
        (["study.budget.minutes"], "no value, got 'study.budget.minutes'"),
    ]:
        assert main(["resume", "s", *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert problem in said.err
    before = study.shown()
    assert main(["resume", "s", "study.budget.trials=4", "study.budget.minutes=0.2"]) == 0
    after = study.shown()
    assert after["budget_trials"] == 4
    assert sum(trial["kind"] == "search" for trial in after["trials"]) == 4
    assert after["trials"][: len(before["trials"])] == before["trials"]


def test_used_up_trials_do_not_prevent_a_resume_with_more_minutes():
    summary = {"seconds": {"total": 60.0}, "trials": [{"kind": "search", "outcome": "ok"}] * 2}
    _check_budget(Budget(minutes=2, trials=2), summary, has_trials=False)  # the finals may go on
    with pytest.raises(BadInput, match="2 trials are already used"):
        _check_budget(Budget(minutes=2, trials=2), summary, has_trials=True)
    with pytest.raises(BadInput, match="minutes are already used"):
        _check_budget(Budget(minutes=1, trials=2), summary, has_trials=False)


@pytest.mark.skipif(num_cores() < 2, reason="needs two cores, to take one away")
def test_study_is_not_resumed_with_fewer_cores(study):
    tuner = study.start(*BUDGET)
    study.wait_for_trial(2, tuner)
    kill(tuner)
    before = len(study.folder.read_trials())
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cores)})  # child processes inherit the affinity
    try:
        ended = study.say("resume", "s")
    finally:
        os.sched_setaffinity(0, all_cores)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"machine.num_cores: was {len(all_cores)}, is 1" in ended.stderr
    assert "start a new study with `autotune run`" in ended.stderr
    assert len(study.folder.read_trials()) == before


def test_resume_with_another_torch_is_refused_and_its_trial_does_not_count(study):
    installed = study.cwd / "installed"
    installed.write_text("2.14.1")
    study.edit(PROGRAM.replace('"2.14.1"', "open('installed').read()"))
    tuner = study.start(*BUDGET)
    study.wait_for_trial(2, tuner)
    kill(tuner)
    installed.write_text("2.15.0")
    ended = study.say("resume", "s")
    assert (ended.returncode, "got torch '2.15.0' instead of '2.14.1'" in ended.stderr) == (2, True)
    assert all(trial.outcome is not Outcome.ok for trial in study.folder.read_trials()[3:])
    assert study.none_is_left()


def test_failed_baseline_is_reported_as_json_and_the_study_can_be_resumed(study):
    study.edit("sys.exit('no data')")
    tuner = study.start(*BUDGET, "--json")
    out, err = tuner.communicate(timeout=30)
    assert tuner.returncode == 3
    document = json.loads(out)
    assert document["status"] == "failed"
    assert "no data" in document["reason"]
    assert "no data" in err
    study.edit(PROGRAM)
    assert study.say("resume", "s").returncode == 0
    assert study.shown()["status"] == "complete"
