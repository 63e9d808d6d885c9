"""Time, which tests and replays put another in the place of."""

from __future__ import annotations

import time


class Clock:
    """The machine's own."""

    def monotonic(self) -> float:
        """Returns seconds that only grow."""
        return time.monotonic()

    def time(self) -> float:
        """Returns seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)
