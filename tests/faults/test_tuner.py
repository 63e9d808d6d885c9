"""The tuner gets SIGKILL or SIGTERM, or loses its terminal: no process is left, and no measurement is lost."""

import contextlib
import os
import pty
import signal
import time

import psutil
import pytest
import yaml

from tests.faults.quick_study import QuickStudy
from tests.faults.stub_study import StubStudy, pids_in
from tests.support.launcher_contract import is_alive
from tests.support.rows import more
from tests.support.waiting import wait_until

# Trial 0 writes a result; trial 1 starts a family of processes and never ends.
STUCK_SECOND = """
progress('init'); progress('steady', 3)
if spec['trial'] == 0:
    answer(); sys.exit()
family()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: time.sleep(60)
"""


@pytest.fixture
def study(tmp_path):
    made = StubStudy(tmp_path, STUCK_SECOND)
    yield made
    made.end()


def in_second_trial(study, **how):
    """Starts the tuner and waits for its second trial; returns the ids of that trial's processes and of the supervisor."""
    study.start(**how)
    pids = pids_in(study.wait_for("trials/0001/pids"))
    assert all(is_alive(pid) for pid in pids)
    return [*pids, study.supervisor.pid]


def assert_nothing_left(study, pids):
    assert [pid for pid in pids if is_alive(pid)] == []
    wait_until(lambda: not study.processes(), "the end of the other processes")  # the keeper ends last


def read_until_there(terminal, path):
    """Reads from a terminal until there is a file, and returns what was shown. Unread output would block the tuner."""
    screen = b""
    os.set_blocking(terminal, False)

    def is_there():
        nonlocal screen
        with contextlib.suppress(BlockingIOError):
            screen += os.read(terminal, 1 << 16)
        return path.exists()

    wait_until(is_there, str(path))
    return screen


def test_tuner_killed_in_a_trial_leaves_no_process(study):
    pids = in_second_trial(study)
    study.process.kill()
    study.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of every process")
    assert_nothing_left(study, pids)
    assert (study.path / "trials" / "0000" / "trial.json").exists()


@pytest.mark.thorough
def test_terminated_tuner_keeps_measurements_and_leaves_no_process(study):
    pids = in_second_trial(study)
    study.process.send_signal(signal.SIGTERM)
    code, output = study.wait()
    assert_nothing_left(study, pids)
    assert code == 130, output
    assert "Traceback" not in output
    assert "everything measured is kept" in output
    summary = study.summary()
    assert summary["status"] == "interrupted"
    assert [trial["outcome"] for trial in summary["trials"]] == ["ok", "interrupted"]


@pytest.mark.thorough
def test_repeated_ctrl_c_does_not_prevent_a_clean_end(study):
    pids = in_second_trial(study)
    for _ in range(6):
        study.process.send_signal(signal.SIGINT)
        time.sleep(0.4)
    code, output = study.wait()
    assert_nothing_left(study, pids)
    assert code == 130, output
    assert "Traceback" not in output
    assert [trial["outcome"] for trial in study.summary()["trials"]] == ["ok", "interrupted"]


@pytest.mark.thorough
def test_closed_terminal_interrupts_the_study_and_leaves_no_process(study):
    ours, theirs = pty.openpty()
    study.environment["TERM"] = "xterm"

    def take_terminal():
        os.setsid()
        os.close(os.open(os.ttyname(theirs), os.O_RDWR))  # makes this the controlling terminal, whose hang-up sends SIGHUP

    study.start(stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    screen = read_until_there(ours, study.path / "trials" / "0001" / "pids")
    pids = [*pids_in(study.path / "trials" / "0001" / "pids"), study.supervisor.pid]
    os.close(ours)
    assert study.process.wait(timeout=60) == 130
    assert_nothing_left(study, pids)
    assert b"measuring" in screen
    summary = study.summary()
    assert summary["status"] == "interrupted"
    assert [trial["outcome"] for trial in summary["trials"]] == ["ok", "interrupted"]


@pytest.mark.thorough
def test_study_continues_if_its_terminal_closes_without_a_signal(tmp_path):  # `disown` in bash, `setsid`
    study = StubStudy(tmp_path, "progress('init'); progress('steady', 3); time.sleep(1); answer()", "study.budget.trials=1")
    ours, theirs = pty.openpty()
    study.environment["TERM"] = "xterm"
    try:
        study.start(stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        read_until_there(ours, study.path / "trials" / "0000")
        os.close(ours)
        assert study.process.wait(timeout=60) == 0
        assert study.summary()["status"] == "complete"
    finally:
        study.end()


@pytest.mark.parametrize("out", ["| head -1", *more("> /dev/full")])
def test_closed_or_full_output_does_not_end_the_study(tmp_path, out):
    study = StubStudy(tmp_path, "progress('init'); progress('steady', 3); time.sleep(0.1); answer()", "study.budget.trials=1")
    try:
        study.argv = ["bash", "-o", "pipefail", "-c", f'"$@" {out}', "bash", *study.argv]
        study.start()
        code, output = study.wait()
        assert code == 0, output
        assert output.count("the study continues without it") == 1
        assert study.summary()["status"] == "complete"
    finally:
        study.end()


@pytest.mark.thorough
def test_study_under_nohup_survives_a_hang_up(tmp_path):
    study = StubStudy(tmp_path, "progress('init'); progress('steady', 3); time.sleep(0.3); answer()", "study.budget.trials=1")
    try:
        study.argv = ["nohup", *study.argv]
        study.start()
        study.wait_for("trials/0000/trial.json")
        psutil.Process(study.process.pid).send_signal(signal.SIGHUP)
        code, output = study.wait()
        assert code == 0, output
        assert study.summary()["status"] == "complete"
    finally:
        study.end()


def test_a_study_runs_in_a_folder_whose_name_is_not_utf_8(tmp_path):
    (cwd := tmp_path / "caf\udce9").mkdir()
    study = QuickStudy(cwd)
    tuner = study.start("study.budget.minutes=0.1", "compile.mode=off")
    out, err = tuner.communicate(timeout=90)
    assert tuner.returncode == 0, err
    assert "No report was written" not in out
    assert study.folder.report_file.is_file()
    assert yaml.safe_load(study.folder.best_file.read_text())["provenance"]["program"]["cwd"] == f"{tmp_path}/caf\\udce9"
