"""What tests of lost nodes share: a program that is hard to end, and how to see that a loss was told and nothing is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from autotune.launchers.base import Ended, Running
from autotune.testing.launcher_contract import is_alive, marked_processes
from autotune.testing.stub_programs import IGNORES_SIGTERM
from tests.faults.quick_study import QuickStudy, kill, measured

# A program with a child in a session of its own that ignores SIGTERM.
FAMILY = f"""
child = spawn({IGNORES_SIGTERM!r}, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
open(folder + "/new", "w").write("%d %d" % (os.getpid(), child.pid)); os.rename(folder + "/new", folder + "/pids")
progress("warmup", 1); time.sleep(600)
"""


def agents(variable: str, value: str) -> list[psutil.Process]:
    """Returns the agents whose engine started them with a variable of that value; other engines may be tested beside it."""
    return [one for one in psutil.process_iter() if _is_agent(one, variable, value)]


def _is_agent(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return process.environ().get(variable) == value and process.cmdline()[1:3] == ["-m", "autotune.launchers.node"]
    except psutil.Error:
        return False


def lost(running: Running, within_s: float) -> Ended:
    """Returns how a trial ended whose node is lost."""
    give_up_s = time.monotonic() + within_s
    while (ended := running.poll()) is None:
        assert time.monotonic() < give_up_s, "the loss was not noticed"
        time.sleep(0.05)
    return ended


def nothing_left(study: Path, pids: Sequence[int], more: Callable[[], Sequence[object]], within_s: float) -> bool:
    """Returns whether no process is left, of the study, among `pids`, and in what `more` returns, after a while at most."""
    give_up_s = time.monotonic() + within_s
    while left := [*marked_processes(study), *more(), *filter(is_alive, pids)]:
        if time.monotonic() > give_up_s:
            print(left)
            return False
        time.sleep(0.1)
    return True


def resume_after_a_killed_tuner(study: QuickStudy, is_idle: Callable[[], bool], *overrides: str) -> None:
    """Kills a study's tuner, resumes the study, and checks that nothing is left, lost or repeated.

    Args:
        study: the study, not started yet.
        is_idle: whether the engine runs nothing.
        overrides: keys that choose the engine.
    """
    process = study.start(*overrides, "explain.auto=false")
    study.wait_for_trial(1, process)
    kill(process)
    assert study.none_is_left()
    assert is_idle()
    before = measured(study.folder.read_trials())
    process = study.resume()
    study.wait_for_trial(2, process, is_started=False)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    trials = study.folder.read_trials()
    assert measured(trials)[: len(before)] == before
    assert len({trial.evidence["node"]["job"] for trial in trials if "node" in trial.evidence}) == 2
    assert study.none_is_left()
