"""Helpers for tests of lost nodes: a program that is hard to end, and checks that a loss is reported and no process is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from autotune.launchers.base import Deadlines, Ended, Launch, Launcher, Running
from tests.faults.quick_study import QuickStudy, kill, measured
from tests.support.launcher_contract import a_launch, is_alive, marked_processes, wait_for
from tests.support.stub_programs import IGNORES_SIGTERM, program
from tests.support.waiting import wait_until

# A program whose child ignores SIGTERM and has its own session.
FAMILY = f"""
child = spawn({IGNORES_SIGTERM!r}, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
open(folder + "/new", "w").write("%d %d" % (os.getpid(), child.pid)); os.rename(folder + "/new", folder + "/pids")
progress("warmup", 1); time.sleep(600)
"""


def agents(variable: str, value: str) -> list[psutil.Process]:
    """Returns the agents whose environment has this value of a variable. Agents of tests that run in parallel are left out."""
    return [one for one in psutil.process_iter() if _is_agent(one, variable, value)]


def _is_agent(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return process.environ().get(variable) == value and process.cmdline()[-2:] == ["-m", "autotune.launchers.node"]
    except psutil.Error:
        return False


def began(launcher: Launcher, folder: Path) -> tuple[Launch, Running, list[int]]:
    """Starts a trial that is hard to end; returns its launch, the running trial and its process ids."""
    # The limit of a step is longer than the 60 s after which Ray notices that its head is lost.
    launch = a_launch(folder, program(FAMILY), deadlines=Deadlines(step_s=600))
    running = launcher.start(launch)
    return launch, running, [int(pid) for pid in wait_for(folder / "pids").split()]


def runs_again(launcher: Launcher, folder: Path, within_s: float = 30) -> Ended:
    """Checks that the launcher runs a further trial; returns how it ended."""
    ended = lost(launcher.start(a_launch(folder, program("result()"))), within_s)
    assert ended.cause == "result", ended
    return ended


def lost(running: Running, within_s: float) -> Ended:
    """Waits until a trial ends because its node is lost; returns how it ended. Prints how long it took."""
    began_s = time.monotonic()
    ended = wait_until(running.poll, "the end of the trial", within_s=within_s)
    print(f"ended after {time.monotonic() - began_s:.1f} s")
    return ended


def nothing_left(study: Path, pids: Sequence[int], more: Callable[[], Sequence[object]], within_s: float) -> bool:
    """Waits up to `within_s`; returns whether all processes of the study and of `pids` are gone and `more` returns nothing.

    Prints how long it took.
    """
    began_s = time.monotonic()
    give_up_s = began_s + within_s
    while left := [*marked_processes(study), *more(), *filter(is_alive, pids)]:
        if time.monotonic() > give_up_s:
            print(left)
            return False
        time.sleep(0.1)
    print(f"nothing left after {time.monotonic() - began_s:.1f} s")
    return True


def listening(process: psutil.Process) -> list[int]:
    """Returns the ports on which a process listens."""
    return [each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN]


def strangers(process: psutil.Process, sent: bytes = b"") -> list[socket.socket]:
    """Connects to every port of a process, sends bytes that it does not understand, or none, and returns the connections."""
    found = [socket.create_connection(("127.0.0.1", port), 5) for port in listening(process)]
    for each in found:
        each.sendall(sent)
    return found


def check_one_job(study: QuickStudy, is_idle: Callable[[], bool], *overrides: str) -> tuple[str, str]:
    """Runs a study of one knob to its verdict on one node; returns what it printed on standard error, and the node's job."""
    (study.cwd / "space.yaml").write_text("precision.amp: ['off', bf16]\n")  # with several knobs, it measures each one's effect
    asked = ("search_space=./space.yaml", *overrides, "study.budget.minutes=1")  # on a quiet machine it ends long before
    out, err = study.start(*asked).communicate(timeout=100)
    assert "verdict" in out, err
    assert "trials run on node" in err
    trials = study.folder.read_trials()
    assert len(trials) >= 3
    ended = {trial.outcome.value for trial in trials if "the trial's time was up" not in trial.reason}  # on a loaded machine
    assert ended <= {"ok", "raced", "disturbed", "unsteady"}, ended
    assert {trial.evidence["node"]["host"] for trial in trials} == {os.uname().nodename}
    (job,) = {trial.evidence["node"]["job"] for trial in trials}  # one for the whole study
    assert study.none_is_left()
    assert is_idle()
    return err, job


def check_study_without_its_job(study: QuickStudy, lose: Callable[[], object], *overrides: str) -> None:
    """Ends the job of a study during a trial; the study must repeat the trial in another job."""
    process = study.start(*overrides, "explain.auto=false")
    study.wait_for_trial(1, process)
    lose()
    study.wait_for_trial(1, process, is_started=False)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "It is repeated on another node" in out + err
    record = study.folder.read_trials()[1]
    assert record.evidence["earlier_attempt"]["outcome"] == "interrupted"
    assert record.outcome.has_value
    assert study.none_is_left()


def check_refused_study(study: QuickStudy, is_idle: Callable[[], bool], message: str, *overrides: str) -> None:
    """Starts a study that must be refused with a message that matches a regular expression, and leaves nothing behind."""
    process = study.start(*overrides)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (2, ""), err
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert study.none_is_left()
    assert is_idle()


def resume_after_a_killed_tuner(study: QuickStudy, is_idle: Callable[[], bool], *overrides: str) -> None:
    """Kills a study's tuner, resumes the study, and checks that no process is left and no trial is lost or repeated.

    Args:
        study: the study, not started yet.
        is_idle: returns whether Slurm or Ray runs nothing.
        overrides: the configuration that chooses Slurm or Ray.
    """
    process = study.start(*overrides, "explain.auto=false")
    study.wait_for_trial(1, process)
    kill(process)
    assert study.none_is_left()
    assert is_idle()
    check_resumed(study, 2)


def check_resumed(study: QuickStudy, number: int) -> None:
    """Resumes a study that has ended before trial `number`; checks that no process is left and no trial lost or repeated."""
    before = measured(study.folder.read_trials())
    process = study.resume()
    study.wait_for_trial(number, process, is_started=False)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    trials = study.folder.read_trials()
    assert measured(trials)[: len(before)] == before
    assert len({trial.evidence["node"]["job"] for trial in trials if "node" in trial.evidence}) == 2
    assert study.none_is_left()
