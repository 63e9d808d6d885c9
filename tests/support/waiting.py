"""Waits for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 60.0  # for a loaded machine; passing tests do not wait this long
Found = TypeVar("Found")


def comes(look: Callable[[], Found], *, within_s: float = PATIENCE_S, every_s: float = 0.02) -> Found:
    """Calls `look` until it returns a true value or the time is over; returns its last value."""
    give_up_s = time.monotonic() + within_s
    while not (found := look()) and time.monotonic() < give_up_s:
        time.sleep(every_s)
    return found


def wait_until(look: Callable[[], Found], what: str = "it", *, within_s: float = PATIENCE_S, every_s: float = 0.02) -> Found:
    """Returns what `comes` does; fails if that is not true."""
    found = comes(look, within_s=within_s, every_s=every_s)
    assert found, f"{what} never came"
    return found
