"""How long the threads of a trial waited for a core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from autotune.monitors.host import PROC

COVERED_FRAC = 0.5  # of a window: looks at less of it do not speak for it


class WaitingWatch:
    """How long the threads of a trial were ready to run and had no core: the kernel's run-queue delay, thread by thread.

    It is what foreign work costs a trial, and nothing else sees it: beside a program that takes one core, a trial of one thread
    on two cores loses nothing (measured: 1.07 of its speed), one of two threads almost all (0.06). A thread that has ended
    takes its counter along, so looks are taken about once a second, while the trial runs.

    Args:
        proc: where the kernel's files are.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._last: dict[str, int] = {}
        self._last_s: float | None = None
        self._waited_s = self._seconds = 0.0

    def waiting_cores(self, seconds: float) -> float | None:
        """Returns the threads waiting, on the average over the looks.

        Args:
            seconds: length of what is asked about; None is the answer when the looks cover too little of it, as with a trial
                that ended before the second one, and where the kernel does not say.
        """
        return self._waited_s / self._seconds if self._seconds > COVERED_FRAC * seconds else None

    def look(self, now_s: float, pids: Iterable[int]) -> None:
        """Reads the delays of all threads of the processes.

        Args:
            now_s: monotonic clock.
            pids: the trial's processes, as far as they are there.
        """
        delays = {file: delay for pid in pids for file, delay in self._delays(pid)}
        known = delays.keys() & self._last.keys()
        if self._last_s is not None and known:
            self._waited_s += sum(delays[file] - self._last[file] for file in known) / 1e9
            self._seconds += now_s - self._last_s
        self._last, self._last_s = delays, now_s

    def _delays(self, pid: int) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError):  # gone
            for thread in os.listdir(f"{self._proc}/{pid}/task"):
                file = f"{self._proc}/{pid}/task/{thread}/schedstat"  # nanoseconds run, nanoseconds waited, times it ran
                words = _words(file)
                if len(words) == 3:
                    yield file, int(words[1])


def _words(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").split()
    except (OSError, ValueError):  # gone
        return []
