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
    """A clock whose monotonic time can be paused. It is paused while a study waits for a node, so waiting costs no budget."""

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._since_s: float | None = None

    def monotonic(self) -> float:
        """Returns the seconds of the monotonic clock, without the pauses."""
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


class VirtualClock(Clock):
    """A clock that begins at `start_s`. It advances only in `sleep`, which does not wait: an hour's study takes no time."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now_s = start_s

    def monotonic(self) -> float:
        """Returns the virtual time."""
        return self.now_s

    def time(self) -> float:
        """Returns the virtual time as seconds since the epoch, counted from a fixed day in 2025."""
        return 1_750_000_000.0 + self.now_s

    def sleep(self, seconds: float) -> None:
        """Advances the virtual time."""
        self.now_s += seconds
