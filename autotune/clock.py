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
