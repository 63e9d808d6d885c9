"""Ctrl-C while a study runs: the first press finishes the running trial, the second stops now, further ones wait for that."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_S = 15.0  # stopping takes less: the launcher's graces and writing the summary


class Interrupts:
    """Hears SIGINT, SIGTERM and SIGHUP while it is entered; nothing measured is lost.

    A signal that is ignored already stays so: `nohup autotune run` outlives its terminal.

    Attributes:
        is_requested: whether the study should end after the running trial.

    Args:
        notice: shows a line to the user.
        clock: seconds, monotonic.
    """

    def __init__(self, notice: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.is_requested = False
        self._notice, self._clock = notice, clock
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []
        self._stopping_since_s: float | None = None

    def __enter__(self) -> Interrupts:
        self._terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()]
        if threading.current_thread() is threading.main_thread():  # signal handlers cannot be set elsewhere
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hear_again(self) -> None:
        """Lets the next signal interrupt at once: the trial is over and on disk, what follows may be cut short."""
        self._stopping_since_s = None

    def _heard(self, number: int, _: FrameType | None) -> None:
        self._silence_closed_terminals()
        if self._stopping_since_s is not None and self._clock() - self._stopping_since_s < STOP_S:
            return  # it is being done: interrupted again, the running trial would go unrecorded
        if self.is_requested or number != signal.SIGINT:  # who terminates, or hangs up, does not wait for a trial
            self.is_requested = True
            self._stopping_since_s = self._clock()
            self._tell("Stopping now: ending the running trial's processes.")
            raise KeyboardInterrupt
        self.is_requested = True
        self._tell("Interrupted: finishing the running trial, then the verdict. Ctrl-C again stops now.")

    def _tell(self, message: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # a terminal that has gone; a print that this signal interrupted
            self._notice(message)

    def _silence_closed_terminals(self) -> None:
        """Lets output to a terminal that was closed go nowhere: writing to it would fail, in the middle of anything."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
