"""If the disk of the runs folder fails, a study ends with one message, leaves no process and keeps its trials.

`test_folder.py` tests full and read-only disks; `test_write_sites.py` lists all writes.
"""

import errno
import subprocess
import sys
import tempfile
import time

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.cli import app
from autotune.cli.main import main
from autotune.errors import BadInput, FolderLost
from autotune.harness import worker
from autotune.owner import OWNER_FILE
from autotune.records import Kind, Outcome, TrialRequest
from autotune.report import picture
from autotune.run_dir import is_study
from autotune.search.study import begin_study
from autotune.studies import create
from tests.faults.disks import DiskInAFile, FaultyWrites, ended, fill, in_memory, remount
from tests.faults.quick_study import PROGRAM, QuickStudy, measured
from tests.support.rows import more
from tests.support.studies import make_study

BUDGET = ("study.budget.minutes=0.1", "compile.mode=off")
LONGER = ("study.budget.minutes=0.3", "compile.mode=off")  # enough for trials of a second
ROOM = "size=20m,nr_inodes=10000"
INODES = [f"nr_inodes={number}" for number in (4, 5, 7, 9, 12, 15, 18, 21)]  # a study makes eight files, a trial nine
BYTES = [f"size={number}k" for number in (4, 8, 16, 28, 44, 64)]  # each file takes at least 4 KiB
# The first trial after the baseline fills the disk except for 256 KiB: enough for its record, too little for its files.
FILLS = """
def fill():
    with open("runs/ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError:
            ballast.truncate(ballast.tell() - (256 << 10))

def write():
    own = os.path.join(folder, "own")
    try:
        with open(own, "wb", buffering=0) as file:
            for _ in range(128):
                file.write(bytes(4096))
    finally:
        os.unlink(own)

if spec["trial"] and not os.path.exists("filled"):
    open("filled", "w").close()
    fill()
"""
STAYS_FULL = f"{FILLS}\nwrite()\n{PROGRAM}"
HAS_ROOM_AGAIN = f"{FILLS}\ntry:\n    write()\nexcept OSError:\n    os.unlink('runs/ballast')\n    raise\n{PROGRAM}"


def assert_no_trial_failed(trials):
    """Checks that no trial is recorded as failed, since only the disk failed."""
    assert [trial for trial in trials if not trial.outcome.has_value and trial.outcome is not Outcome.interrupted] == []


def kept(trials):
    """Returns the fields of trials that must not change. The baseline's record gets further values after its measurement."""
    return [(trial.number, trial.outcome, trial.value, trial.changed) for trial in trials]


def resume_and_check(study, before):
    """Resumes a study, or starts it again if it had not begun; checks that it completes and keeps its trials."""
    if is_study(study.folder.path):
        done = study.say("resume", "s")
        assert done.returncode == 0, done.stderr
    else:
        tuner = study.start(*BUDGET)
        _, err = tuner.communicate(timeout=60)
        assert tuner.returncode == 0, err
    trials = study.folder.read_trials()
    assert kept(trials)[: len(before)] == kept(before)
    assert len(set(measured(trials))) == len(measured(trials)), "a trial was repeated"
    assert study.folder.read_summary()["status"] == "complete"
    assert [entry.name for entry in study.folder.path.parent.iterdir() if entry.name.startswith("s")] == ["s"]


# Full disks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["nr_inodes=2", *more("nr_inodes=1", "nr_inodes=3")])
def test_study_that_does_not_fit_on_the_disk_leaves_no_files(tmp_path, limit):
    with in_memory(tmp_path / "runs", f"size=1m,{limit}") as runs:
        study = QuickStudy(tmp_path)
        said = ended(study.start(*BUDGET))
        assert "No space left on device" in said
        assert "resume" not in said, "there is nothing to resume"
        assert list(runs.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [*INODES, *BYTES])
def test_study_on_a_disk_that_fills_up_at_any_write_loses_no_trial(tmp_path, limit):
    with in_memory(tmp_path / "runs", f"size=20m,{limit}") as runs:
        study = QuickStudy(tmp_path)
        said = ended(study.start(*LONGER))  # long enough for a second trial even on a busy machine
        assert "No space left on device" in said
        assert limit in INODES or "inodes" not in said
        assert said.endswith("autotune resume s" if is_study(study.folder.path) else "start the study again")
        assert study.none_is_left()
        assert not [file for file in runs.rglob("*.tmp") if not file.name.startswith("result.")], "a file of autotune"
        before = study.folder.read_trials()
        assert_no_trial_failed(before)
        remount(runs, ROOM)
        resume_and_check(study, before)


@pytest.mark.thorough
def test_trial_whose_files_do_not_fit_is_not_recorded_as_failed(tmp_path):
    with in_memory(tmp_path / "runs", "size=8m") as runs:
        study = QuickStudy(tmp_path, program=STAYS_FULL)
        said = ended(study.start(*LONGER))
        assert "the disk is full" in said
        assert said.endswith("autotune resume s")
        assert study.none_is_left()
        before = study.folder.read_trials()
        assert [trial.number for trial in before if trial.outcome.has_value] == [0]
        assert_no_trial_failed(before)
        (runs / "ballast").unlink()
        resume_and_check(study, before)


@pytest.mark.thorough
def test_trial_that_failed_on_a_full_disk_is_repeated_once_there_is_room(tmp_path):
    with in_memory(tmp_path / "runs", "size=8m"):
        study = QuickStudy(tmp_path, program=HAS_ROOM_AGAIN)
        tuner = study.start(*LONGER)
        _, err = tuner.communicate(timeout=90)
        assert tuner.returncode == 0, err
        trials = study.folder.read_trials()
        assert_no_trial_failed(trials)
        assert trials[1].outcome.has_value
        assert "No space left on device" in trials[1].evidence["earlier_attempt"]["reason"]


def test_worker_counters_are_not_created_on_a_full_disk(tmp_path):
    with in_memory(tmp_path / "disk", "size=64k") as disk:
        worker.create(str(disk / "there.bin"), 2)
        assert [counters.batches for counters in worker.read(str(disk / "there.bin"))] == [0.0, 0.0]
        fill(disk)
        with pytest.raises(OSError, match="No space left on device"):
            worker.create(str(disk / "none.bin"), 2)


# Quota, failing, removed and hanging disks ---------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "what", "todo"),
    [
        (errno.EDQUOT, "your quota is used up (Disk quota exceeded)", "Remove some files"),
        (errno.EIO, "cannot be written any more (Input/output error)", "Make it writable"),
    ],
)
def test_quota_and_device_errors_end_the_study(tmp_path, number, what, todo):
    faults = FaultyWrites(tmp_path, tmp_path / "runs")
    study = QuickStudy(tmp_path, trial_s=1.0, environment=faults.environment)
    tuner = study.start(*LONGER)
    study.wait_for_trial(1, tuner)
    before = study.folder.read_trials()
    faults.begin(number)
    assert ended(tuner).endswith(f"runs/s: {what}. What was measured before is kept. {todo}, then: autotune resume s")
    assert study.none_is_left()
    faults.end()
    assert_no_trial_failed(study.folder.read_trials())
    resume_and_check(study, before)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["fail", "unplug"])
def test_study_ends_when_the_disk_fails_and_can_be_resumed_later(tmp_path, fault):
    disk = DiskInAFile(tmp_path / "runs")
    try:
        study = QuickStudy(tmp_path, trial_s=1.0)
        tuner = study.start(*LONGER)
        study.wait_for_trial(1, tuner)
        before = study.folder.read_trials()
        getattr(disk, fault)()
        said = ended(tuner)
        assert ("runs/s: the study's folder is gone" if fault == "unplug" else "runs/s: cannot be written any more") in said
        assert study.none_is_left()
        if fault == "unplug":
            assert list(disk.path.iterdir()) == [], "something was written in place of the disk"
        disk.mend()
        assert study.folder.read_trials()[: len(before)] == before
        assert_no_trial_failed(study.folder.read_trials())
        resume_and_check(study, before)
    finally:
        disk.close()


@pytest.mark.thorough
def test_study_loses_no_trial_if_the_disk_hangs_for_seconds(tmp_path):
    disk = DiskInAFile(tmp_path / "runs")
    try:
        study = QuickStudy(tmp_path, trial_s=1.0)
        limits = ("study.budget.minutes=0.5", "study.budget.trials=2")
        tuner = study.start(*limits, "compile.mode=off", "measure.quiet=false")
        study.wait_for_trial(1, tuner)
        with disk.frozen():
            time.sleep(4.0)
            assert tuner.poll() is None
        _, err = tuner.communicate(timeout=90)
        assert tuner.returncode == 0, err
        assert study.none_is_left()
        trials = study.folder.read_trials()
        assert {trial.outcome for trial in trials} == {Outcome.ok}
        assert len(set(measured(trials))) == len(measured(trials)), "a trial was repeated"
        assert study.folder.read_summary()["status"] == "complete"
    finally:
        disk.close()


# Commands and documents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_commands_on_a_full_or_read_only_disk_work_or_print_one_error(tmp_path, capsys, fault):
    with in_memory(tmp_path / "runs", "size=4m") as runs:
        make_study(runs, "s")
        if fault == "full":
            fill(runs)
        else:
            remount(runs, "ro")
        given = ["--runs-dir", str(runs)]
        reading = [["list"], ["show", "s"], ["show", "s", "--json"], ["show", "s", "--trial", "1"], ["export", "s"], ["prune"]]
        writing = [["report", "s"], ["export", "s", "-o", str(runs / "mine.yaml")]]
        for words in (*reading, *writing):
            code = main([*words, *given])
            said = capsys.readouterr().err
            assert code == (2 if words in writing else 0), (words, said)
            assert len([line for line in said.splitlines() if line.startswith("autotune: ")]) == (words in writing), said
            assert "internal error" not in said
        assert not list(runs.rglob("*.tmp"))


def test_study_whose_owner_file_cannot_be_written_does_not_start(tmp_path):
    with in_memory(tmp_path / "runs", "size=1m,nr_inodes=3") as runs:
        folder = create(runs, "s")
        said = r"no inodes for more files .* Nothing was measured yet\. Remove some files, then: start the study again"
        with pytest.raises(FolderLost, match=said), folder.claimed():
            pass
        folder.discard()
        assert list(runs.iterdir()) == []


def test_discard_removes_neither_studies_nor_files_of_the_user(tmp_path):
    folder = make_study(tmp_path / "runs")
    folder.discard()
    assert len(folder.read_trials()) == 8
    other = create(tmp_path / "runs", "mine")
    (other.path / "notes.txt").write_text("of the user")
    (other.path / OWNER_FILE).write_text("{}")
    other.discard()
    assert [path.name for path in other.path.iterdir()] == ["notes.txt"]


def test_creation_of_a_trial_folder_waits_for_room(tmp_path, monkeypatch):
    with in_memory(tmp_path / "runs", "size=1m,nr_inodes=4") as runs:
        folder = create(runs, "s")
        (runs / "other").touch()
        monkeypatch.setattr(time, "sleep", lambda _: remount(runs, "nr_inodes=20"))
        folder.write_request(TrialRequest(number=0, kind=Kind.baseline, knobs={}, changed={}))
        assert (folder.trial_path(0) / "asked.json").exists()


def test_journal_waits_for_room_and_contains_no_partial_line(tmp_path, monkeypatch):
    with in_memory(tmp_path / "disk", "size=256k") as disk:
        journal = disk / "optuna.journal"
        study = begin_study(journal, "s", optuna.samplers.RandomSampler())
        fill(disk)
        monkeypatch.setattr(time, "sleep", lambda _: (disk / "ballast").unlink())
        study.set_user_attr("long", "x" * 10000)  # its beginning fits into the journal's last page
        assert not (disk / "ballast").exists(), "the disk was not full"
        storage = JournalStorage(JournalFileBackend(str(journal)))
        assert len(optuna.load_study(study_name="s", storage=storage).user_attrs["long"]) == 10000


def test_internal_error_with_a_full_temporary_folder_is_one_message(tmp_path, capsys, monkeypatch):
    def broken():
        raise RuntimeError("a fault")

    with in_memory(tmp_path / "tmp", "size=64k") as full:
        fill(full)
        monkeypatch.setattr(tempfile, "tempdir", str(full))
        monkeypatch.setattr(app, "build", broken)
        assert main(["list"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("autotune: internal error: RuntimeError: a fault. --debug prints the traceback, which could not be")
    assert "Traceback" not in said


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_picture_is_refused_if_temporary_files_cannot_be_written(tmp_path, capsys, monkeypatch, fault):
    make_study(tmp_path / "runs", "s")
    monkeypatch.setattr(picture, "BROWSERS", ("true",))
    with in_memory(tmp_path / "tmp", "size=64k") as temporary:
        if fault == "full":
            fill(temporary)
        else:
            remount(temporary, "ro")
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        given = ["--runs-dir", str(tmp_path / "runs"), "--picture", str(tmp_path / "x.png")]
        assert main(["report", "s", *given]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("autotune: --picture: no temporary file can be written, got ")
    assert said.endswith("Free some space, or set TMPDIR=DIR.")
    assert not (tmp_path / "x.png").exists()


def test_picture_error_without_a_temporary_folder_names_the_candidates(tmp_path, capsys, monkeypatch):
    make_study(tmp_path / "runs", "s")
    monkeypatch.setattr(picture, "BROWSERS", ("true",))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert main(["report", "s", "--runs-dir", str(tmp_path / "runs"), "--picture", str(tmp_path / "x.png")]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("autotune: TMPDIR: no folder for temporary files can be written, got ['/nowhere'].")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EROFS, "Read-only file system", "a/b"), "output: cannot be written, got 'a/b' (Read-only file system)."),
        (
            OSError(errno.EROFS, "Read-only file system"),
            "output: cannot be written, the disk is read-only (Read-only file system).",
        ),
        (
            OSError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "TMPDIR: no folder for temporary files can be",
        ),
    ],
)
def test_write_errors_are_not_reported_as_internal_errors(capsys, monkeypatch, error, told):
    def broken():
        raise error

    monkeypatch.setattr(app, "build", broken)
    assert main(["list"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"autotune: {told}")


def test_exit_status_is_kept_if_the_error_message_cannot_be_written(tmp_path):
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "autotune", "show", "none", "--runs-dir", str(tmp_path)]
        assert subprocess.run(words, stderr=full, stdout=subprocess.DEVNULL).returncode == BadInput.exit_code
