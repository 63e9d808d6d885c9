"""A study's folder: its name, documents that are never half written, and which process owns it."""

import dataclasses
import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.documents import write_text
from autotune.errors import BadInput, FolderLost
from autotune.owner import OWNER_FILE, held, owner_of
from autotune.records import Kind, Outcome, TrialRecord, TrialRequest
from autotune.run_dir import StudyFolder
from autotune.studies import call, create, find, studies
from tests.support.studies import make_study


@pytest.fixture
def folder(tmp_path):
    return make_study(tmp_path / "runs")


def test_two_studies_with_the_same_name_can_both_be_found(tmp_path):
    runs = tmp_path / "runs"
    first, second = make_study(runs), make_study(runs)
    assert find(runs, "resnet18").path == second.path
    assert find(runs, "resnet18-2").path == second.path
    assert find(runs, str(first.path)).path == first.path
    assert call(second) == f"resnet18-2 --runs-dir {runs}"
    assert call(first) == f"{first.path} --runs-dir {runs}"


def test_later_of_two_studies_that_got_the_same_number_is_found(tmp_path):
    runs = tmp_path / "runs"
    first, second = make_study(runs), make_study(runs)
    about = first.read_study()
    second.write_study(dataclasses.replace(second.read_study(), sequence=about.sequence, started_at=about.started_at + 0.1))
    assert find(runs, "resnet18").path == second.path


def test_name_ending_in_a_number_is_not_mistaken_for_a_later_study(tmp_path):
    runs = tmp_path / "runs"
    train, other = make_study(runs, "train"), make_study(runs, "train-2")  # studies of train.py and train-2.py
    assert find(runs, "train").path == train.path
    assert find(runs, "train-2").path == other.path
    again = make_study(runs, "train")
    assert again.name == "train-3"
    assert find(runs, "train").path == again.path


@pytest.mark.parametrize("name", ["../secrets", "/etc/passwd", "a/../../b", ""])
def test_find_refuses_paths_that_are_not_studies(tmp_path, name):
    with pytest.raises(BadInput, match=r"STUDY: (no such study|a file outside any study)"):
        find(tmp_path / "runs", name)


def test_damaged_study_can_be_found_and_hides_no_other(tmp_path):
    runs = tmp_path / "runs"
    damaged, whole = make_study(runs, "a"), make_study(runs, "b")
    damaged.study_file.write_text("[1, 2")
    assert find(runs, "a").path == damaged.path
    assert find(runs, "b").path == whole.path
    assert [folder.name for folder in studies(runs)] == ["a", "b"]


def test_sequence_of_studies_does_not_depend_on_the_clock(tmp_path):
    runs = tmp_path / "runs"
    first = make_study(runs, "a")
    first.write_study(dataclasses.replace(first.read_study(), started_at=4e9))
    assert make_study(runs, "b").read_study().sequence == first.read_study().sequence + 1


def test_documents_are_readable_only_by_their_owner(folder):
    assert folder.path.stat().st_mode & 0o777 == 0o700
    for file in (folder.study_file, folder.summary_file, folder.trial_path(0) / "trial.json"):
        assert file.stat().st_mode & 0o777 == 0o600


def test_document_is_complete_even_if_its_writer_is_killed(tmp_path):
    """Another process keeps replacing a document until it is killed."""
    file = tmp_path / "d.json"
    code = (
        "import itertools, json, pathlib, sys; from autotune.documents import write_text\n"
        "for n in itertools.count(): write_text(pathlib.Path(sys.argv[1]), json.dumps([n] * 50000)); print(n, flush=True)"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(3):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        assert len(set(json.loads(file.read_text()))) == 1


def test_leftover_files_of_a_killed_writer_are_removed(folder):
    left = [folder.path / "summary.json.123.tmp", folder.trial_path(1) / "trial.json.123.tmp", folder.path / ".probe"]
    for file in left:
        file.write_text("half")
    folder.tidy()
    assert not any(file.exists() for file in left)


def test_tidy_ignores_a_folder_that_cannot_be_read(folder, monkeypatch):
    (folder.path / ".probe").touch()

    def glob(path, pattern):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(Path, "glob", glob)
    folder.tidy()


def test_failed_write_leaves_the_document_unchanged(tmp_path, monkeypatch):
    file = tmp_path / "d.json"
    write_text(file, "before")

    def fsync(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_text(file, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]
    assert file.read_text() == "before"


def test_deleted_folder_is_not_created_again(folder, tmp_path):
    with folder.claimed():
        os.rename(folder.path, tmp_path / "elsewhere")
        with pytest.raises(FolderLost, match="is gone"):
            folder.write_summary({})
        with pytest.raises(FolderLost, match="is gone"):
            folder.check()
    assert not folder.path.exists()


def test_error_names_a_deleted_trial_folder_rather_than_the_study_folder(tmp_path):
    folder = create(tmp_path / "runs", "s")
    with folder.claimed():
        folder.write_request(TrialRequest(number=1, kind=Kind.search, knobs={}, changed={}))
        shutil.rmtree(folder.trial_path(1))
        with pytest.raises(FolderLost, match=r"trials/0001: gone .* To continue: autotune resume s"):
            folder.write_trial(TrialRecord(number=1, kind=Kind.search, knobs={}, changed={}, outcome=Outcome.ok))
        shutil.rmtree(folder.path / "trials")
        folder.write_request(TrialRequest(number=2, kind=Kind.search, knobs={}, changed={}))
        assert (folder.trial_path(2) / "asked.json").exists()


def test_resume_command_uses_the_path_if_a_later_study_has_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, full = make_study(Path("runs"), "s"), OSError(errno.ENOSPC, "No space left on device")
    assert str(first.lost(full)).endswith(": autotune resume s")
    make_study(Path("runs"), "s")
    assert str(first.lost(full)).endswith(": autotune resume runs/s")


def test_older_study_in_the_working_directory_is_called_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = make_study(Path(), "s")
    assert call(first) == "s --runs-dir ."
    make_study(Path(), "s")
    assert call(first) == "./s --runs-dir ."
    assert find(Path(), "./s").path == first.path


def test_study_does_not_write_to_another_folder_in_its_place(tmp_path):
    folder = create(tmp_path / "runs", "s")
    with folder.claimed():
        os.rename(folder.path, tmp_path / "elsewhere")
        with create(tmp_path / "runs", "s").claimed(), pytest.raises(FolderLost, match="is gone"):
            folder.write_summary({})


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_lock_of_another_process_is_noticed_on_nfs(tmp_path, monkeypatch, mode):
    """NFS refuses an exclusive lock on a file that is not open for writing, and a shared lock on one not open for reading."""
    flock, opened = fcntl.flock, os.open

    def flock_of_nfs(descriptor, operation):
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    def opened_by_user(path, flags, *rest, **named):  # root may write any file
        if flags & os.O_ACCMODE != os.O_RDONLY and not mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *rest, **named)

    (file := tmp_path / "owner.json").touch()
    with file.open("w") as owner:
        flock(owner, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
        monkeypatch.setattr(os, "open", opened_by_user)
        with held(file) as is_free:
            assert not is_free
    with held(file) as is_free:
        assert is_free
    with held(tmp_path) as is_free:  # a folder cannot be opened for writing
        assert is_free
    with held(tmp_path / "none") as is_free:
        assert is_free


HOLD = "import sys, time; from autotune.run_dir import StudyFolder; from pathlib import Path\nwith StudyFolder(Path(sys.argv[1])).claimed(): print('held', flush=True); time.sleep(60)"  # noqa: E501


def test_study_is_owned_by_one_process_until_that_process_ends(tmp_path):
    folder = make_study(tmp_path / "runs", status="running")
    assert folder.current_summary()["status"] == "interrupted", "no process owns it"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        assert owner_of(folder.path)["pid"] == owner.pid
        assert folder.current_summary()["status"] == "running"
        with pytest.raises(BadInput, match=rf"another autotune is working on it, got 'resnet18' \(process {owner.pid} on host"):
            folder.claimed().__enter__()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert owner_of(folder.path) is None
    with folder.claimed() as problem:
        assert problem == ""


def test_broken_pipe_is_not_mistaken_for_a_lost_folder(tmp_path):
    folder = create(tmp_path, "s")
    with pytest.raises(BrokenPipeError), folder.claimed():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert not folder.is_owned


def test_child_process_does_not_keep_the_ownership_of_a_study(folder):
    with folder.claimed():
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        assert owner_of(folder.path) is None
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def no_locks(monkeypatch):
    """Makes the system call fail as on a network file system without locks."""

    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)


@pytest.mark.parametrize(("pid", "is_alive"), [(None, True), (2**22 + 1, False)], ids=["owner alive", "owner gone"])
def test_without_file_locks_the_owner_counts_while_its_process_lives(tmp_path, no_locks, pid, is_alive):
    folder = make_study(tmp_path / "runs", status="running")
    started_at = psutil.Process().create_time()
    owner = {"host": platform.node(), "pid": pid or os.getpid(), "started_at": started_at}
    (folder.path / OWNER_FILE).write_text(json.dumps(owner))
    assert folder.is_owned is is_alive
    if is_alive:
        with pytest.raises(BadInput, match="another autotune is working on it"):
            folder.claimed().__enter__()
    else:
        with folder.claimed() as problem:
            assert problem == "No locks available"


def test_without_file_locks_a_study_that_has_ended_is_free_on_every_host(folder, no_locks, monkeypatch):
    with folder.claimed():
        monkeypatch.setattr(platform, "node", lambda: "other")
        assert folder.is_owned
    assert not folder.is_owned
    folder.check_free()


def test_an_owner_on_another_host_is_refused_with_the_file_that_makes_it_the_owner(folder, no_locks):
    (folder.path / OWNER_FILE).write_text(json.dumps({"host": "n1", "pid": 7, "started_at": 1.0}))
    with pytest.raises(BadInput, match=r"process 7 on host n1.* If n1 does not run it any more, remove .*/owner\.json\."):
        folder.check_free()


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"pid": "x"}'])
def test_unreadable_owner_file_does_not_block_a_study(folder, text):
    (folder.path / OWNER_FILE).write_text(text)
    assert not folder.is_owned
    with folder.claimed():
        assert StudyFolder(folder.path).is_owned
