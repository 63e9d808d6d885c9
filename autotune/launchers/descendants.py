"""Tracks which descendants of the supervisor belong to which trial, so that the supervisor can end all of them.

Only the supervisor can find all processes of a trial. It is a subreaper (prctl(2)): if the parent of one of its descendants
exits, the descendant becomes the supervisor's child. So whatever a trial starts stays among the supervisor's descendants, even
a daemon that has forked twice, started a new session and cleared its environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

from autotune.launchers import process_tree
from autotune.launchers.writers import parent_of


class Descendants:
    """The processes of all running trials.

    `look` lists all process ids, but reads the parents of new processes only. That is cheap enough to do once a second while a
    trial is measured.
    """

    def __init__(self) -> None:
        self._alive: dict[str, dict[int, psutil.Process]] = {}
        self._seen: dict[str, dict[int, float]] = {}
        self._known = set(psutil.pids())  # processes that existed before the first trial belong to no trial

    def add(self, mark: str, pid: int) -> None:
        """Adds a trial.

        Args:
            mark: value of MARK_VARIABLE in the environment of its processes, see environment.mark_of.
            pid: id of its first process, whose exit status has not been collected yet.
        """
        self._alive[mark], self._seen[mark] = {}, {}
        self._keep(mark, pid)

    def look(self, *, is_thorough: bool = False) -> None:
        """Adds the processes that have started since the last call, and removes those that have exited.

        Args:
            is_thorough: read the parents of all processes. This also finds a new process of a trial that has the same id as an
                unrelated process that has exited since the last call.
        """
        present = set(psutil.pids())
        for alive in self._alive.values():
            for pid in [pid for pid, process in alive.items() if not process_tree.is_alive(process)]:
                del alive[pid]
        belongs = {pid: mark for mark, alive in self._alive.items() for pid in alive}
        new = present - belongs.keys() if is_thorough else present - self._known - belongs.keys()
        parents = {pid: parent for pid in new if (parent := parent_of(pid))}
        while found := {pid: mark for pid, parent in parents.items() if (mark := self._mark_of(pid, parent, belongs))}:
            for pid, mark in found.items():
                self._keep(mark, pid)
                belongs[pid] = mark
                del parents[pid]
        self._known = present

    def of(self, mark: str) -> list[psutil.Process]:
        """Returns a trial's processes that were alive at the last `look`."""
        return list(self._alive[mark].values())

    def seen(self, mark: str) -> dict[int, float]:
        """Returns all processes of a trial seen so far, also exited ones: id -> creation time, seconds since the epoch."""
        return dict(self._seen[mark])

    def drop(self, mark: str) -> None:
        """Removes a trial."""
        del self._alive[mark], self._seen[mark]

    def _keep(self, mark: str, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            created_s = process.create_time()
        except psutil.Error:  # exited already
            return
        if process_tree.is_alive(process):
            self._alive[mark][pid] = process
        self._seen[mark][pid] = created_s

    def _mark_of(self, pid: int, parent: int, belongs: dict[int, str]) -> str | None:
        if parent != os.getpid():
            return belongs.get(parent)
        # A new child of this process is an orphan: its parent has exited. An orphan without the mark of a running trial is
        # attributed to the trial that was started last.
        return _known_mark(pid, self._alive) or next(reversed(self._alive), None)


def _known_mark(pid: int, marks: Iterable[str]) -> str | None:
    try:
        mark = process_tree.mark(psutil.Process(pid))
    except psutil.Error:
        return None
    return mark if mark in marks else None
