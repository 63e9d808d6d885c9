"""The runs folder becomes full, read-only or deleted: one message, no process is left, and the measurements are kept."""

import contextlib
import shutil
import subprocess
import time

import pytest

from autotune.records import Outcome
from tests.faults.disks import ended, fill, in_memory
from tests.faults.quick_study import QuickStudy

pytestmark = pytest.mark.thorough

BUDGET = ("study.budget.minutes=0.1", "compile.mode=off")
LONGER = ("study.budget.minutes=0.3", "compile.mode=off")  # enough for trials of a second


def test_full_disk_ends_the_study_and_resume_continues_it(tmp_path):
    with in_memory(tmp_path / "runs", "size=2m") as runs:
        study = QuickStudy(tmp_path)
        tuner = study.start(*BUDGET)
        study.wait_for_trial(1, tuner, is_started=False)
        before = study.folder.read_trials()
        fill(runs)
        said = ended(tuner)
        assert "runs/s: the disk is full (No space left on device)" in said
        assert said.endswith("autotune resume s")
        assert study.none_is_left()
        trials = study.folder.read_trials()
        assert trials[: len(before)] == before
        assert not list(study.folder.path.rglob("*.tmp"))
        (runs / "ballast").unlink()
        assert study.say("resume", "s").returncode == 0
        assert study.folder.read_trials()[: len(before)] == before


def test_study_survives_a_disk_that_is_full_for_seconds(tmp_path):
    with in_memory(tmp_path / "runs", "size=2m") as runs:
        study = QuickStudy(tmp_path, trial_s=1.0)
        tuner = study.start(*LONGER, "study.budget.trials=2")
        study.wait_for_trial(1, tuner)
        time.sleep(0.5)
        fill(runs)
        time.sleep(2.5)  # the trial ends meanwhile
        (runs / "ballast").unlink()
        tuner.communicate(timeout=60)
        assert tuner.returncode == 0
        assert study.folder.read_summary()["status"] == "complete"


def test_disk_that_becomes_read_only_ends_the_study(tmp_path):
    with in_memory(tmp_path / "runs", "size=20m") as runs, contextlib.ExitStack() as stack:
        study = QuickStudy(tmp_path, trial_s=1.0)
        tuner = study.start(*LONGER)
        study.wait_for_trial(1, tuner)
        before = study.folder.read_trials()
        # The kernel refuses to remount a file system read-only while a file is open for writing; a failing disk would not wait.
        # So the folder is mounted over itself: then every path leads to the read-only mount.
        subprocess.run(["mount", "--bind", runs, runs], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", runs], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", runs], check=True)
        said = ended(tuner)
        assert "runs/s: cannot be written any more (Read-only file system)" in said
        assert said.endswith("Make it writable, then: autotune resume s")
        assert study.none_is_left()
        assert study.folder.read_trials()[: len(before)] == before
        assert all(trial.outcome is Outcome.ok for trial in study.folder.read_trials())
        assert '"status": "interrupted"' in study.say("show", "s", "--json").stdout


@pytest.mark.parametrize("what", ["study", "runs"])
def test_deleted_folder_ends_the_study_and_is_not_created_again(tmp_path, what):
    study = QuickStudy(tmp_path, trial_s=1.0)
    tuner = study.start(*LONGER)
    study.wait_for_trial(1, tuner)
    doomed = study.folder.path if what == "study" else study.folder.path.parent
    shutil.rmtree(doomed)
    said = ended(tuner)
    assert "runs/s: the study's folder is gone" in said
    assert study.none_is_left()
    assert not doomed.exists()
