"""Protection from other users of the same machine: their links, file modes, open ports and signals."""

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from autotune.cli import output
from autotune.cli.main import main
from autotune.errors import BadInput, FolderLost
from autotune.harness.protocol import MARK_VARIABLE
from autotune.launchers.process_tree import members
from autotune.launchers.tuner_files import left_by_killed
from autotune.studies import create
from autotune.trackers import store
from tests.cli.conftest import Cli
from tests.faults.quick_study import QuickStudy
from tests.support.studies import make_study
from tests.support.waiting import wait_until

NOBODY = 65534
SECRET = "hf_abcdefghijklmnop0001"


@contextmanager
def open_umask() -> Iterator[None]:
    """Lets processes started inside the context write files for everybody, unless they set a mode."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Returns a file of the user that must not be changed through a link."""
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


def listening(process: psutil.Process) -> set[str]:
    """Returns the addresses that a process and its descendants listen on."""
    found = set()
    for each in (process, *process.children(recursive=True)):
        try:
            connections = each.net_connections(kind="inet")
        except psutil.Error:  # ended meanwhile
            continue
        found |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    return found


# Links placed by other users ----------------------------------------------------------------------------------------------


def test_output_to_a_shared_folder_does_not_follow_links(tmp_path, victim, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0123")  # as if the temporary file's name were predictable
    (tmp_path / f"best.yaml.{os.getpid()}.0123.tmp").symlink_to(victim)
    with pytest.raises(BadInput, match="--output: cannot be written"):
        output.write("threads: {intra: 1}\n", tmp_path / "best.yaml")
    assert victim.read_text() == "precious"


def test_links_with_the_name_of_a_study_are_ignored(tmp_path, victim):
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs/s").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs/s-2").symlink_to(tmp_path / "nowhere")
    assert create(tmp_path / "runs", "s").name == "s-3"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_lock_files_are_not_opened_through_links(tmp_path, victim):
    folder = make_study(tmp_path / "runs")
    for file in (folder.path / "owner.json", folder.path / ".sync.lock", tmp_path / "runs/.mlflow.lock"):
        file.symlink_to(victim)
    with pytest.raises(FolderLost), folder.claimed():
        pass
    with pytest.raises(OSError, match="symbolic links"):
        store.ensure_store(tmp_path / "runs", lambda _: None)
    with store.only_writer(folder):
        pass
    assert victim.read_text() == "precious"


def test_hard_links_are_not_accepted_as_job_notes(tmp_path, victim):
    victim.write_text("")  # like a job's note, which is empty until the job is lost
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    names = [f".autotune-{platform.node()}-{dead.pid}-autotune-{job}.job" for job in ("1a2b3c4d", "5a6b7c8d")]
    (tmp_path / names[0]).hardlink_to(victim)
    (tmp_path / names[1]).touch()
    assert [note.name for note in left_by_killed(tmp_path, ".job")] == names[1:]  # autotune writes to the files listed here


# Modes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_study_files_are_private_with_any_umask(tmp_path):
    study = QuickStudy(tmp_path)
    with open_umask():
        tuner = study.start("study.budget.trials=1")
    assert tuner.communicate(timeout=90)[0] is not None
    assert tuner.returncode == 0
    assert study.folder.path.parent.stat().st_mode & 0o022 == 0
    assert [path for path in (study.folder.path, study.folder.path / "trials") if path.stat().st_mode & 0o077] == []
    files = [path for path in (*study.folder.path.glob("*.*"), *study.folder.path.glob("trials/*/*.json")) if path.is_file()]
    by_program = ("result.rank0.json",)  # written by the program of this test, not by the harness
    assert len(files) > 10
    assert [path for path in files if path.stat().st_mode & 0o077 and path.name not in by_program] == []


@pytest.mark.thorough
def test_tracking_store_is_private_with_any_umask(tmp_path):
    make_study(tmp_path / "runs")
    with open_umask():
        ended = Cli(tmp_path)("sync")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs/mlflow.db").stat().st_mode & 0o077 == 0
    assert (tmp_path / "runs/mlartifacts").stat().st_mode & 0o077 == 0


def test_traceback_of_an_internal_error_is_private_and_masked(tmp_path, monkeypatch, capsys):
    def fail() -> None:
        raise RuntimeError(f"refused {SECRET}")

    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("autotune.cli.app.build", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_umask():
        assert main(["list"]) == 1
    assert SECRET not in capsys.readouterr().err
    (log,) = tmp_path.iterdir()
    assert log.stat().st_mode & 0o077 == 0
    assert "RuntimeError: refused ***" in log.read_text()


# Sockets and signals ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_study_opens_no_port(tmp_path):
    study = QuickStudy(tmp_path, trial_s=3.0)
    words = ["run", "device.kind=cpu", "study.name=s", "runs_dir=runs", "study.budget.trials=1"]
    command = ["--", sys.executable, "-S", "train.py", "3"]
    environment = Cli(tmp_path).environment
    tuner = subprocess.Popen(
        [sys.executable, "-m", "autotune", *words, *command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    study.wait_for_trial(0, tuner)
    found: set[str] = set()
    seen = 0
    while tuner.poll() is None and seen < 20:
        found |= listening(psutil.Process(tuner.pid))
        seen += 1
        time.sleep(0.2)
    tuner.send_signal(signal.SIGINT)
    tuner.communicate(timeout=60)
    assert seen > 5
    assert found == set()


@pytest.mark.thorough
def test_the_ui_listens_only_on_loopback(tmp_path):
    make_study(tmp_path / "runs")
    ui = Cli(tmp_path).start("ui")
    try:
        assert any("MLflow UI: " in line for line in iter(ui.stdout.readline, ""))
        assert listening(psutil.Process(ui.pid)) == {"127.0.0.1"}
    finally:
        ui.send_signal(signal.SIGTERM)
        ui.communicate(timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user, or send it a signal")
def test_processes_of_other_users_do_not_belong_to_a_study():
    environment = {**os.environ, MARK_VARIABLE: "/runs/s:0001"}
    own, other = (subprocess.Popen(["sleep", "60"], env=environment, cwd="/", user=user) for user in (None, NOBODY))
    try:
        for process in (own, other):  # until then, the kernel may not show the environment
            wait_until(Path(f"/proc/{process.pid}/environ").read_bytes, "the environment of the process")
        assert [process.pid for process in members(lambda mark: mark == "/runs/s:0001")] == [own.pid]
    finally:
        for process in (own, other):
            process.kill()
            process.wait()
