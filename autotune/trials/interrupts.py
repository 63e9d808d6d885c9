"""Handles Ctrl-C during a study: the first press lets the running trial finish, the second stops the trial.

Further presses while the study is stopping do nothing.
"""

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

# Once a stop has begun, further signals are ignored for this long. The launcher's grace periods and the summary take less time.
STOP_S = 15.0
BY_USER = "stopped by the user"


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP within its context, so that a stopped study keeps its measurements.

    Signals that are already ignored stay ignored: `nohup autotune run` outlives its terminal.

    Attributes:
        is_requested: whether the study should end after the running trial.
        reason: for the study's record, whether the user or a signal stopped it.
    """

    def __init__(self, notice: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.is_requested, self.reason = False, BY_USER
        self._notice, self._clock = notice, clock
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []
        self._stopping_since_s: float | None = None
        self._is_on_disk = False  # whether all results are on disk, so that an interrupt loses none

    def __enter__(self) -> Interrupts:
        self._terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()]
        if threading.current_thread() is threading.main_thread():  # only the main thread can set signal handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hear_again(self) -> None:
        """Lets the next signal interrupt at once, even a first Ctrl-C. Called once all results are on disk."""
        self._stopping_since_s, self._is_on_disk = None, True

    def _heard(self, number: int, _: FrameType | None) -> None:
        self._silence_closed_terminals()
        if self._stopping_since_s is not None and self._clock() - self._stopping_since_s < STOP_S:
            return  # already stopping: a further interrupt would prevent recording the running trial
        self.reason = BY_USER if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        if self._is_on_disk or self.is_requested or number != signal.SIGINT:  # SIGTERM and SIGHUP do not wait for the trial
            self.is_requested = True
            self._stopping_since_s = self._clock()
            if not self._is_on_disk:
                self._tell("Stopping now: ending the running trial's processes.")
            raise KeyboardInterrupt
        self.is_requested = True
        self._tell("Interrupted: finishing the running trial, then the verdict. Press Ctrl-C again to stop now.")

    def _tell(self, message: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the terminal is gone, or the signal interrupted a print
            self._notice(message)

    def _silence_closed_terminals(self) -> None:
        """Redirects output for closed terminals to /dev/null: any write to such a terminal could fail."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
