"""Provides the clock, which tests and replays replace."""

from __future__ import annotations

import time


class Clock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Returns the seconds of the monotonic clock."""
        return time.monotonic()

    def time(self) -> float:
        """Returns seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


class PausableClock(Clock):
    """A clock whose monotonic time stands still while it is paused, so that waiting for a node costs no budget."""

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._since_s: float | None = None

    def monotonic(self) -> float:
        """Returns the seconds of the monotonic clock, without all pauses."""
        return (super().monotonic() if self._since_s is None else self._since_s) - self._paused_s

    def pause(self) -> None:
        """Stops the monotonic time; does nothing if it is already stopped."""
        if self._since_s is None:
            self._since_s = super().monotonic()

    def go_on(self) -> None:
        """Restarts the monotonic time from where it stopped."""
        if self._since_s is not None:
            self._paused_s += super().monotonic() - self._since_s
            self._since_s = None
