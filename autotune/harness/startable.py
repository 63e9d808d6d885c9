"""Decides whether a loader's workers can be started by spawn or forkserver.

Such workers are sent pickled objects, and they import the program's main module. The check runs in the process that trains, on
the objects themselves: it pickles them and discards the bytes.
"""

from __future__ import annotations

import linecache
import multiprocessing
import multiprocessing.context as contexts
import os
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any, Dict

# After this many pickled bytes the rest is assumed to be picklable, too. So a table of a billion rows is not pickled whole.
ENOUGH_BYTES = 64 * 2**20
PARTS = {"dataset": "data set", "collate_fn": "collate_fn", "worker_init_fn": "worker_init_fn"}  # sent to workers
UNGUARDED = (
    "each worker that is not forked imports the program's main module ({}), and the import starts training: it has no "
    '`if __name__ == "__main__":`'
)
# Name of the main module if a package or a folder is run. Workers do not import this module (see multiprocessing.spawn).
NEVER_IMPORTED = "__main__"


def problem(parts: Dict[str, Any]) -> str:
    """Returns why workers cannot be started by spawn or forkserver; "" if no reason is known.

    Args:
        parts: "dataset", "collate_fn" and "worker_init_fn" of a loader, as far as they are known.
    """
    for name, words in PARTS.items():
        why = _unpicklable(parts.get(name))
        if why:
            return f"the {words} cannot be sent to workers that are not forked: {why}"
    return _unguarded()


class _Enough(Exception):
    pass


class _Sink:
    """Counts the bytes written to it and discards them."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Counts what the pickler writes."""
        self._num_bytes += len(data)
        if self._num_bytes > ENOUGH_BYTES:
            raise _Enough
        return len(data)


class _Pickler(ForkingPickler):
    """Pickles as for a new process, but without tensors: they can always be sent, and pickling moves them to shared memory."""

    def reducer_override(self, value: Any) -> Any:
        """Replaces tensors and storages; called by pickle for each object."""
        import torch

        if isinstance(value, (torch.Tensor, torch.UntypedStorage)):
            return int, ()
        return NotImplemented


class _FutureProcess:
    """Stands in for the process that would be started: locks and pipes can be pickled only while a process is started."""

    DupFd = int

    def duplicate_for_child(self, descriptor: int) -> int:
        """Returns the descriptor for the other process."""
        return descriptor


def _unpicklable(value: Any) -> str:
    try:
        contexts.set_spawning_popen(_FutureProcess())  # type: ignore[arg-type]
        # With protocol 5 and a buffer callback, the data of arrays is not copied. ForkingPickler forwards no keywords, so all
        # arguments are positional.
        _Pickler(_Sink(), 5, True, lambda _: None).dump(value)
    except _Enough:
        return ""
    except Exception as error:  # a data set's own __reduce__ may raise anything
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}" if first else type(error).__name__
    finally:
        contexts.set_spawning_popen(None)
    return ""


def _unguarded() -> str:
    """Returns why workers must not import the main module; "" if they do not, or may import it.

    They may if its source contains `__name__`, because it then probably does not train when it is imported, or if
    multiprocessing has started this process, which has then imported it as well.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None) or ""
    name = getattr(getattr(main, "__spec__", None), "name", None) or os.path.splitext(os.path.basename(path))[0]
    source = "".join(linecache.getlines(path))
    if name.rpartition(".")[2] == NEVER_IMPORTED or not source or "__name__" in source:
        return ""  # workers do not import this main module: it is `__main__.py`, or it has no source (`python -c`)
    return "" if multiprocessing.parent_process() else UNGUARDED.format(os.path.basename(path))
