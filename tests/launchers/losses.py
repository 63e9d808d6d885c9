"""Helpers for tests of lost nodes: a program that is hard to end, and checks that a loss is reported and no process is left."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from autotune.launchers.base import Ended, Running
from tests.faults.quick_study import QuickStudy, kill, measured
from tests.support.launcher_contract import is_alive, marked_processes
from tests.support.waiting import wait_until
from tests.support.stub_programs import IGNORES_SIGTERM

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
