"""Lets a command clean up when it receives SIGTERM, SIGHUP or Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from autotune.errors import Interrupted


@contextlib.contextmanager
def stoppable(what: str) -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt, so that the code in the `with` block cleans up. Ignores further signals.

    Args:
        what: what to tell the user after a signal.

    Raises:
        Interrupted: there was a signal.
    """
    before: dict[signal.Signals, Any] = {}

    def stop(*_: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        if threading.current_thread() is threading.main_thread():  # only the main thread can set signal handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, stop)
        yield
    except KeyboardInterrupt:
        raise Interrupted(what) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
