"""When this command began: what a user waits for, and a budget holds, is the whole of it, imports and all."""

from __future__ import annotations

import os
import time
from pathlib import Path

STARTING_S = 5.0  # an interpreter takes less to get here: an older process was another program before, as by `exec` in a shell

_began_s: float | None = None


def begin(*, is_process: bool) -> None:
    """Notes that a command begins.

    Args:
        is_process: whether it has a process of its own: then it began when that was started.
    """
    global _began_s
    _began_s = time.monotonic() - (_age_s() if is_process else 0.0)


def began_s() -> float:
    """Returns when the command began, on the monotonic clock; now where that is not known."""
    return time.monotonic() if _began_s is None else _began_s


def _age_s() -> float:
    """Returns how long ago this process was started; 0 where nothing tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return age_s if 0 < age_s < STARTING_S else 0.0
