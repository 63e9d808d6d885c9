"""Provides a virtual clock, so that tests need not wait."""

from __future__ import annotations

from autotune.clock import Clock


class VirtualClock(Clock):
    """A clock that only `sleep` advances. `sleep` returns at once, so that an hour's study takes no time."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now_s = start_s

    def monotonic(self) -> float:
        """Returns the virtual time."""
        return self.now_s

    def time(self) -> float:
        """Returns the virtual time as if it began on a fixed day."""
        return 1_750_000_000.0 + self.now_s

    def sleep(self, seconds: float) -> None:
        """Advances the virtual time."""
        self.now_s += seconds
