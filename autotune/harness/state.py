"""What this process is to the harness, and how it speaks to the user. Imports nothing that trains."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, Dict, List, Optional

if TYPE_CHECKING:
    from .context import TrialContext

session: Optional[TrialContext] = None  # this process's, once torch is there
is_called = False  # the program itself has asked for the harness, by `autotune.apply`
# How this process came to torch: {"is_first": of the trial's processes, "changed": names of the environment variables that the
# program itself changed before}. {} in a warm start, where torch was there before.
startup: Dict[str, Any] = {}


def stand_aside(doing: str) -> None:
    """Says in one line, in an `except` block, that the harness has failed; the program goes on."""
    kind, value, trace = sys.exc_info()
    last = traceback.extract_tb(trace)[-1] if trace is not None else None
    where = f" ({os.path.basename(last.filename)}:{last.lineno})" if last is not None else ""
    first = (str(value).strip().splitlines() or [""])[0]
    name = kind.__name__ if kind is not None else "error"
    say([f"the harness failed while {doing}: {name}: {first}{where}; it stands aside and the program goes on"])


def say(lines: List[str]) -> None:
    """Writes lines to standard error, at once, wherever that leads."""
    try:
        sys.stderr.write("".join(f"autotune: {line}\n" for line in lines))
        sys.stderr.flush()
    except Exception:  # the program has closed it, or the disk is full
        pass
