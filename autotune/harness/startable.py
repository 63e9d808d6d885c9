"""Whether a loader's workers can be started otherwise than by fork: they are sent what they work on, and import the program.

Looked at in the process that trains and on the objects themselves: what can be pickled is seen by pickling it into nothing.
"""

from __future__ import annotations

import ast
import linecache
import multiprocessing.context as contexts
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any, Dict, Optional

# Bytes pickled before it is taken for granted that the rest can be, too: a table of a billion rows is not gone through.
ENOUGH_BYTES = 64 * 2**20
PARTS = {"dataset": "data set", "collate_fn": "collate_fn", "worker_init_fn": "worker_init_fn"}  # what a worker is sent
UNGUARDED = (
    "each worker that is not forked imports the program's main module, which trains as it is imported: "
    'it has no `if __name__ == "__main__":` round it'
)


def problem(parts: Dict[str, Any], main_line: Optional[int]) -> str:
    """Returns why workers cannot be started by spawn or forkserver; "" when nothing speaks against it.

    Args:
        parts: "dataset", "collate_fn" and "worker_init_fn" of a loader, as far as they are known.
        main_line: the line of the main module that led to its construction; None when it was made elsewhere.
    """
    for name, words in PARTS.items():
        why = _unpicklable(parts.get(name))
        if why:
            return f"the {words} cannot be sent to workers that are not forked: {why}"
    return UNGUARDED if _is_unguarded(main_line) else ""


class _Enough(Exception):
    pass


class _Sink:
    """Counts bytes and keeps none."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Takes what the pickler writes."""
        self._num_bytes += len(data)
        if self._num_bytes > ENOUGH_BYTES:
            raise _Enough
        return len(data)


class _Pickler(ForkingPickler):
    """Pickles as for a new process, but for tensors: those would be moved into shared memory, and can always be sent."""

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for each object."""
        import torch

        if isinstance(value, (torch.Tensor, torch.UntypedStorage)):
            return int, ()
        return NotImplemented


class _Nobody:
    """Stands for the process that would be started: locks and pipes can be pickled for one only."""

    DupFd = int

    def duplicate_for_child(self, descriptor: int) -> int:
        """Returns what the other process would have."""
        return descriptor


def _unpicklable(value: Any) -> str:
    try:
        contexts.set_spawning_popen(_Nobody())  # type: ignore[arg-type]
        # Protocol 5 with a callback leaves arrays where they are. Positional: ForkingPickler hands no keywords on.
        _Pickler(_Sink(), 5, True, lambda _: None).dump(value)
    except _Enough:
        return ""
    except Exception as error:  # whatever a data set's own __reduce__ may raise
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}" if first else type(error).__name__
    finally:
        contexts.set_spawning_popen(None)
    return ""


def _is_unguarded(main_line: Optional[int]) -> bool:
    source = "".join(linecache.getlines(getattr(sys.modules.get("__main__"), "__file__", None) or ""))
    if main_line is None or not source:
        return False  # `python -c`: nothing is imported anew
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # changed since it was started
        return False
    led = next((each for each in statements if each.lineno <= main_line <= (each.end_lineno or each.lineno)), None)
    return led is not None and not (isinstance(led, ast.If) and _asks_name(led.test))


def _asks_name(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
