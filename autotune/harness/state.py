"""Holds the harness's state in this process and writes messages to the user. Does not import torch."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, Dict, List, Optional

from .context import TrialContext

session: Optional[TrialContext] = None  # the session of this process; None until torch is imported
is_called = False  # whether the program itself started the harness by `autotune.apply`
# How this process imported torch; {} in a warm start, where torch is already imported.
#   "is_first": whether it was the trial's first process.
#   "changed": names of the environment variables that the program had changed before the import.
#   "changed_before_compiler": names of the variables that torch's compiler reads and that the program had changed before it
#       imported the compiler; absent if the compiler was not imported.
#   "imports": module -> seconds, for imports that a warm server may repeat (libraries.py). A warm server is a process that
#       imports libraries once and forks each trial. Absent before the first step.
#   "is_repeatable": whether a warm server can repeat the import of torch with its environment, because one of the imports in
#       "imports" has imported torch. These imports then also made the changes that "changed" names. Absent before the first
#       step.
startup: Dict[str, Any] = {}


def stand_aside(doing: str) -> None:
    """Reports in one line that the harness has failed and the program continues; called in an `except` block."""
    kind, value, trace = sys.exc_info()
    last = traceback.extract_tb(trace)[-1] if trace is not None else None
    where = f" ({os.path.basename(last.filename)}:{last.lineno})" if last is not None else ""
    first = (str(value).strip().splitlines() or [""])[0]
    name = kind.__name__ if kind is not None else "error"
    say([f"the harness failed while {doing}: {name}: {first}{where}; it does nothing more, and the program continues"])


def say(lines: List[str]) -> None:
    """Writes lines to the program's standard error and flushes it."""
    try:
        sys.stderr.write("".join(f"autotune: {line}\n" for line in lines))
        sys.stderr.flush()
    except Exception:  # the program has closed it, or the disk is full
        pass
