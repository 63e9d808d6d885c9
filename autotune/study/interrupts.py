"""Ctrl-C while a study runs: the first press finishes the running trial, the second stops now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """Hears SIGINT, SIGTERM and SIGHUP while it is entered; nothing measured is lost.

    Attributes:
        is_requested: whether the study should end after the running trial.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.is_requested = False
        self._notice = notice
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signal handlers cannot be set elsewhere
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, _: FrameType | None) -> None:
        if self.is_requested or number != signal.SIGINT:  # who terminates, or hangs up, does not wait for a trial
            self.is_requested = True
            raise KeyboardInterrupt
        self.is_requested = True
        self._notice("Interrupted: finishing the running trial, then the verdict. Ctrl-C again stops now.")
