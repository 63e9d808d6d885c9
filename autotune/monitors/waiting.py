"""Measures how long the threads of a trial wait for a core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from autotune.harness.cores import read
from autotune.monitors.host import PROC

COVERED_FRAC = 0.5  # there is a result only if the readings that count cover more than this share of the window


class WaitingWatch:
    """Measures how long a trial's threads were ready to run but had no core: the kernel's run-queue delay of each thread.

    The amount of foreign load does not show what it costs a trial: while another program used one of two cores, a trial with
    one thread was not slowed down (1.07 times its usual speed), a trial with two threads nearly stopped (0.06 times). A
    thread's counter disappears with the thread, so it is read about once a second while the trial runs.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._last: dict[str, int] = {}
        self._last_s: float | None = None
        self._waited_s = self._seconds = 0.0

    def waiting_cores(self, seconds: float) -> float | None:
        """Returns the mean number of waiting threads between the first look and the last.

        Args:
            seconds: length of the window. The result is None if the looks cover too little of it, as for a trial that ended
                before the second look, or if the kernel does not report delays.
        """
        return self._waited_s / self._seconds if self._seconds > COVERED_FRAC * seconds else None

    def look(self, now_s: float, pids: Iterable[int]) -> None:
        """Reads the delays of all threads of the trial's processes; those that have exited are skipped."""
        delays = {file: delay for pid in pids for file, delay in self._delays(pid)}
        known = delays.keys() & self._last.keys()
        if self._last_s is not None and known:
            self._waited_s += sum(delays[file] - self._last[file] for file in known) / 1e9
            self._seconds += now_s - self._last_s
        self._last, self._last_s = delays, now_s

    def _delays(self, pid: int) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError):  # exited
            for thread in os.listdir(f"{self._proc}/{pid}/task"):
                file = f"{self._proc}/{pid}/task/{thread}/schedstat"  # nanoseconds run, nanoseconds waited, times it ran
                words = read(file).split()
                if len(words) == 3:
                    yield file, int(words[1])
