"""Whom a process works for, and that it does not outlive its owner for long."""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
import time

EXIT_TOO_LATE = 1


class Owner:
    """Who started this process: whoever holds the other end of the pipe on its standard input, else its parent.

    The pipe closes when its owner ends, however it ends, or lets go of it on purpose: nothing more is to come. Made early:
    an owner that died before is not noticed without a pipe.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._has_pipe = _is_pipe(sys.__stdin__)

    @property
    def is_gone(self) -> bool:
        """Whether the owner has ended or let go."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Waits, at most until the owner is gone; returns whether it is."""
        if self._has_pipe:
            watch = select.poll()
            watch.register(0, 0)  # a hang-up is always reported; what is written is nobody's business
            return bool(watch.poll(seconds * 1000))
        time.sleep(seconds)
        return os.getppid() != self._parent

    def limit(self, last_s: float) -> None:
        """Ends this process `last_s` seconds after its owner, whatever it is doing then."""

        def watch() -> None:
            while not self.wait(1.0):
                pass
            time.sleep(last_s)
            os._exit(EXIT_TOO_LATE)

        threading.Thread(target=watch, name="owner", daemon=True).start()


def _is_pipe(stream: object) -> bool:
    try:
        return stream is not None and stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:  # closed
        return False
