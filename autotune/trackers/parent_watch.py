"""Watches the parent process, so that this process ends soon after it."""

from __future__ import annotations

import os
import select
import stat
import threading
import time

EXIT_TOO_LATE = 1


class ParentWatch:
    """Detects that the parent has ended or has closed the pipe on this process's standard input.

    The pipe closes no matter how the parent ends, and it stays closed. So even the first check notices a parent that has
    already ended. The parent may also close the pipe on purpose, when no more work will follow. Without a pipe, only the parent
    process id is checked.
    """

    def __init__(self) -> None:
        self._parent, self._has_pipe = os.getppid(), _is_pipe(0)

    @property
    def is_gone(self) -> bool:
        """Whether the parent has ended or closed the pipe."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Waits until the parent is gone, at most `seconds`; without a pipe, always `seconds`. Returns whether it is gone."""
        if self._has_pipe:
            watch = select.poll()
            watch.register(0, 0)  # a hang-up is always reported; input is ignored
            return bool(watch.poll(seconds * 1000))
        time.sleep(seconds)
        return os.getppid() != self._parent

    def limit(self, last_s: float) -> None:
        """Ends this process `last_s` seconds after the parent is gone, no matter what this process is doing then."""

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
