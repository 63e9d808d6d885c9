"""The processes of a trial: how they are found, and how all of them are ended.

A trial's processes are those in the first one's session or group, those that carry the trial's mark in their environment
(children that made a session of their own keep it), and everything below any of these. A process is ended by id *and*
start time, which psutil checks before it signals, so that a reused id is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable

import psutil

from autotune.harness.protocol import MARK_VARIABLE


def members(root: int | None, is_marked: Callable[[str], bool], known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Returns the living processes of a trial; zombies are not alive.

    Args:
        root: id of the first process. It must not have been reaped yet, or the id may mean somebody else's session.
        is_marked: whether a value of MARK_VARIABLE is the trial's.
        known: processes found earlier: they still belong, wherever they have been re-parented to.
    """
    everyone = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    parents = {process.pid: _parent(process) for process in everyone}
    belongs = {process.pid for process in known if process in everyone}
    belongs |= {process.pid for process in everyone if _is_own(process.pid, root) or is_marked(_mark(process))}
    belongs -= _ancestors(parents)
    while more := {pid for pid, parent in parents.items() if parent in belongs} - belongs:
        belongs |= more
    return [process for process in everyone if process.pid in belongs and _is_alive(process)]


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
    return f"{process.pid} ({command[:80]})"


def _is_own(pid: int, root: int | None) -> bool:
    if root is None:
        return False
    try:
        return root in (pid, os.getsid(pid), os.getpgid(pid))
    except OSError:
        return False


def _mark(process: psutil.Process) -> str:
    try:
        return str(process.environ().get(MARK_VARIABLE, ""))
    except (psutil.Error, OSError):
        return ""


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _ancestors(parents: dict[int, int | None]) -> set[int]:
    """Returns the tuner's own ancestors: a study started inside a trial of another one must not end its parents."""
    found: set[int] = set()
    pid: int | None = os.getppid()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid)
    return found
