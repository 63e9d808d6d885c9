"""Processes whose parent is gone: how they are found, and how processes are ended.

Left behind are those that carry a mark in their environment (children that made a session of their own keep it) and
everything below any of these. A process is ended by id *and* start time, which psutil checks before it signals, so that a
reused id is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping

import psutil

from autotune.harness.protocol import MARK_VARIABLE
from autotune.plain_text import one_line

SAME_S = 0.5  # two processes may read the start of a third a little differently; an id is not used again so soon

# They remove what killed processes leave (segments of shared memory, sockets) and end by themselves once they are not needed;
# both outlive a SIGTERM of the others, and multiprocessing's ignores its own.
JANITORS = ("torch_shm_manager", "multiprocessing.resource_tracker")


def members(is_marked: Callable[[str], bool], known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Returns the living processes that are marked or known, and all below them; zombies are not alive.

    Args:
        is_marked: whether a value of MARK_VARIABLE is one of those looked for.
        known: processes that belong whatever their environment says.
    """
    everyone = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    parents = {process.pid: _parent(process) for process in everyone}
    belongs = {process.pid for process in known if process in everyone}
    belongs |= {process.pid for process in everyone if is_marked(mark(process))}
    belongs -= _ancestors(parents)
    while more := {pid for pid, parent in parents.items() if parent in belongs} - belongs:
        belongs |= more
    return [process for process in everyone if process.pid in belongs and is_alive(process)]


def still_there(seen: Mapping[int, float]) -> list[psutil.Process]:
    """Returns those of the processes that run, and are the same: created when it is said.

    Args:
        seen: process id -> when it was created, seconds since the epoch.
    """
    found = []
    for pid, created_s in seen.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - created_s) < SAME_S and is_alive(process):
                found.append(process)
    return found


def end(find: Callable[[], list[psutil.Process]], *, terminate_s: float, kill_s: float) -> list[psutil.Process]:
    """Ends processes, and those that they start meanwhile; returns the ones that would not end.

    Args:
        find: returns those that are alive now.
        terminate_s: how long to wait after SIGTERM.
        kill_s: how long to wait after SIGKILL.
    """
    ending = Ending(terminate_s=terminate_s, kill_s=kill_s)
    while alive := find():
        if ending.is_over(alive):
            return alive
        psutil.wait_procs(alive, timeout=0.1)
    return []


class Ending:
    """The steps towards an empty process tree: SIGTERM, a grace, SIGKILL, a grace.

    Attributes:
        is_signalled: whether a signal has been sent.
    """

    def __init__(self, *, terminate_s: float, kill_s: float) -> None:
        self.is_signalled = False
        self._terminate_s, self._kill_s = terminate_s, kill_s
        self._since_s = 0.0

    def is_over(self, alive: list[psutil.Process]) -> bool:
        """Takes the step that is due; whether there is none left to take.

        Args:
            alive: the processes to end, as they are now.
        """
        now_s = time.monotonic()
        if not self.is_signalled:
            self.is_signalled, self._since_s = True, now_s
            others = [process for process in alive if not is_janitor(process)]
            send(others or alive, signal.SIGTERM)
            send(others or alive, signal.SIGCONT)  # who is stopped hears nothing but SIGKILL
        waited_s = now_s - self._since_s
        if waited_s > self._terminate_s:
            others = [process for process in alive if not is_janitor(process)]
            is_late = waited_s > self._terminate_s + self._kill_s / 2  # they had their time, too
            send(alive if is_late else others, signal.SIGKILL)
        return waited_s > self._terminate_s + self._kill_s


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Sends a signal to each process that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def describe(process: psutil.Process) -> str:
    """Returns "1234 (python train.py)" for a message."""
    try:
        command = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        command = "gone"
    return f"{process.pid} ({one_line(command, 80)})"


def mark(process: psutil.Process) -> str:
    """Returns what a process carries in MARK_VARIABLE; "" for nothing, or when it may not be asked."""
    try:
        return str(process.environ().get(MARK_VARIABLE, ""))
    except (psutil.Error, OSError):
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs: this very one, not another with its id, and no zombie."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def is_taken(pid: int) -> bool:
    """Whether some process with this id runs."""
    try:
        return is_alive(psutil.Process(pid))
    except psutil.Error:
        return False


def is_janitor(process: psutil.Process) -> bool:
    """Whether a process is a library's own helper that cleans up after others."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(name in command for name in JANITORS)


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _ancestors(parents: dict[int, int | None]) -> set[int]:
    """Returns the tuner's own ancestors: a study started inside a trial of another one must not end its parents."""
    found: set[int] = set()
    pid: int | None = os.getppid()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid)
    return found
