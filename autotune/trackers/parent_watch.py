"""Whom a process works for, so that it does not outlive them for long."""

from __future__ import annotations

import os
import select
import stat
import threading
import time

EXIT_TOO_LATE = 1


class ParentWatch:
    """Tells when the process that started this one is gone: it holds the other end of the pipe on standard input.

    The pipe closes when its holder ends, however that ends, also before this process looked for the first time; and when its
    holder lets go on purpose: nothing more is to come. Without a pipe it is the parent that counts.
    """

    def __init__(self) -> None:
        self._parent, self._has_pipe = os.getppid(), _is_pipe(0)

    @property
    def is_gone(self) -> bool:
        """Whether the other side has ended or let go."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Waits, at most until the line is cut; returns whether it is."""
        if self._has_pipe:
            watch = select.poll()
            watch.register(0, 0)  # a hang-up is always reported; what is written to it is ignored
            return bool(watch.poll(seconds * 1000))
        time.sleep(seconds)
        return os.getppid() != self._parent

    def limit(self, last_s: float) -> None:
        """Ends this process `last_s` seconds after the line is cut, whatever it is doing then."""

        def watch() -> None:
            while not self.wait(1.0):
                pass
            time.sleep(last_s)
            os._exit(EXIT_TOO_LATE)

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False
