"""Finds a study's processes, even those whose parent is gone, and ends them.

A study's processes have a mark in their environment, which children inherit even if they start a new session. All descendants
of a marked process belong to the study, too. Before psutil sends a signal, it checks the process's start time. So no signal
reaches a later process that got the same id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping

import psutil

from autotune.harness.protocol import MARK_VARIABLE
from autotune.launchers.writers import parent_of
from autotune.plain_text import one_line

SAME_S = 0.5  # tolerance between two readings of a process's start time; process ids are not reused this soon

# Helpers that remove what killed processes leave behind (shared memory, sockets), and exit once they are no longer needed.
# Both keep running when the other processes get SIGTERM. The resource tracker also ignores a SIGTERM sent to itself.
JANITORS = ("torch_shm_manager", "multiprocessing.resource_tracker")


def members(is_marked: Callable[[str], bool], known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Returns the running processes that are marked or in `known`, and all their descendants; leaves out zombies.

    Args:
        is_marked: returns whether a value of MARK_VARIABLE is one of the wanted marks.
        known: processes to include with or without a mark.
    """
    everyone = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    parents = {process.pid: parent_of(process.pid) for process in everyone}
    belongs = {process.pid for process in known if process in everyone}
    belongs |= {process.pid for process in everyone if is_marked(mark(process))}
    belongs -= _ancestors(parents)
    while more := {pid for pid, parent in parents.items() if parent in belongs} - belongs:
        belongs |= more
    return [process for process in everyone if process.pid in belongs and is_alive(process)]


def still_there(seen: Mapping[int, float]) -> list[psutil.Process]:
    """Returns the processes of `seen` ({id: seconds since the epoch when created}) that still run; skips reused ids."""
    found = []
    for pid, created_s in seen.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - created_s) < SAME_S and is_alive(process):
                found.append(process)
    return found


def end(find: Callable[[], list[psutil.Process]], *, terminate_s: float, kill_s: float) -> list[psutil.Process]:
    """Ends processes, and those that they start meanwhile; returns the processes that could not be ended.

    Args:
        find: returns those of the processes that run now.
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
    """Ends a process tree step by step: SIGTERM, a grace period, SIGKILL, a grace period."""

    def __init__(self, *, terminate_s: float, kill_s: float) -> None:
        self.is_signalled = False
        self._terminate_s, self._kill_s = terminate_s, kill_s
        self._since_s = 0.0

    def is_over(self, alive: list[psutil.Process]) -> bool:
        """Takes the step that is due for the processes in `alive`; returns whether the last grace period is over."""
        now_s = time.monotonic()
        if not self.is_signalled:
            self.is_signalled, self._since_s = True, now_s
            others = [process for process in alive if not is_janitor(process)]
            send(others or alive, signal.SIGTERM)
            send(others or alive, signal.SIGCONT)  # a stopped process handles SIGTERM only once it continues
        waited_s = now_s - self._since_s
        if waited_s > self._terminate_s:
            others = [process for process in alive if not is_janitor(process)]
            is_late = waited_s > self._terminate_s + self._kill_s / 2  # janitors are killed half a grace period later
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
    """Returns a process's MARK_VARIABLE; "" if it has none, or runs as another user, who may set any mark."""
    try:
        found = str(process.environ().get(MARK_VARIABLE, ""))
        return found if found and process.uids().real == os.getuid() else ""
    except (psutil.Error, OSError):
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Whether exactly this process runs: not another one with the same id, and not a zombie.

    A process whose main thread has ended is shown as a zombie while its other threads still run or exit. Only the last thread
    to exit releases the memory and closes the files, which may take seconds.
    """
    try:
        if not process.is_running():
            return False
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) or _has_threads(process.pid)
    except psutil.Error:
        return False


def _has_threads(pid: int) -> bool:
    """Whether a process has threads besides its main thread."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def exit_status(process: subprocess.Popen[bytes], patience_s: float) -> int:
    """Waits for a child to exit and returns its status; kills the child after `patience_s`."""
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def is_taken(pid: int) -> bool:
    """Whether some process with this id runs."""
    try:
        return is_alive(psutil.Process(pid))
    except psutil.Error:
        return False


def is_janitor(process: psutil.Process) -> bool:
    """Whether a process is a library's helper that cleans up after other processes."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(name in command for name in JANITORS)


def _ancestors(parents: Mapping[int, int]) -> set[int]:
    """Returns this process's ancestors. They must not be ended: a study may run inside another study's trial."""
    found: set[int] = set()
    pid = os.getppid()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found
