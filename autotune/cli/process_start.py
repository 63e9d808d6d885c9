"""Begins a command: records the start time, from which the budget counts, and unsets impossible terminal sizes.

Also opens the standard streams that the caller has closed.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import IO

# Python itself starts in less time than this. If the process is older when autotune begins, it was another program first, such
# as a shell that called `exec`, and its age is ignored.
STARTING_S = 5.0
# rich and typer fail on sizes such as a superscript 2, 10**20 or letters, and print nothing at all into 0 columns.
SIZE, SIZES = re.compile("[1-9][0-9]{0,3}"), ("COLUMNS", "LINES", "TERMINAL_WIDTH")

_began_s: float | None = None
closed: list[str] = []  # names of the standard streams that the caller has closed


def begin(*, is_process: bool) -> None:
    """Records that a command begins, unsets variables whose terminal size is impossible, and opens closed standard streams.

    Args:
        is_process: whether this process runs only this command. If so, the command began when the process started.
    """
    global _began_s
    _began_s = time.monotonic() - (_age_s() if is_process else 0.0)
    if is_process:
        _open_streams()
    for name in SIZES:
        if not SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]


def _open_streams() -> None:
    """Opens /dev/null in place of each standard stream that is closed.

    Otherwise, the next file opened would get the stream's number, and what a library writes to the stream would end up in that
    file. Also, Python would print messages for a closed standard error to standard output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is the stream's
            closed.append(name)
            setattr(
                sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", errors="backslashreplace", closefd=False)
            )


def has_stdout() -> bool:
    """Whether the caller has left standard output open."""
    return bool(sys.stdout) and "stdout" not in closed


def silence(stream: IO[str]) -> None:
    """Redirects all further output of a stream to /dev/null, including the content of its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def began_s() -> float:
    """Returns when the command began, on the monotonic clock; the current time if unknown."""
    return time.monotonic() if _began_s is None else _began_s


def _age_s() -> float:
    """Returns the age of this process, in seconds; 0 if unknown or implausible."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return age_s if 0 < age_s < STARTING_S else 0.0
