"""Decides whether a loader's workers can be started by spawn or forkserver.

Such workers are sent pickled objects, and they import the program's main module. The check runs in the process that trains, on
the objects themselves: it pickles them and discards the bytes.
"""

from __future__ import annotations

import ast
import linecache
import multiprocessing.context as contexts
import os
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any, Dict, Iterable, List, Optional, Set

# After this many pickled bytes the rest is assumed to be picklable, too; a table of a billion rows need not be pickled whole.
ENOUGH_BYTES = 64 * 2**20
PARTS = {"dataset": "data set", "collate_fn": "collate_fn", "worker_init_fn": "worker_init_fn"}  # sent to workers
UNGUARDED = "each worker that is not forked imports the program's main module ({}), and the import starts training: {}"
NO_GUARD, OUTSIDE = 'it has no `if __name__ == "__main__":`', 'it trains outside its `if __name__ == "__main__":`'
# Name of the main module if a package or a folder is run. Workers do not import this module (see multiprocessing.spawn).
NEVER_IMPORTED = "__main__"


def problem(parts: Dict[str, Any], main_line: Optional[int], began_lines: Iterable[int] = ()) -> str:
    """Returns why workers cannot be started by spawn or forkserver; "" if no reason is known.

    Args:
        parts: "dataset", "collate_fn" and "worker_init_fn" of a loader, as far as they are known.
        main_line: the line of the main module that led to the loader's construction; None if the loader was made elsewhere.
        began_lines: the lines of the main module that led to iterations over the loader, which start its workers; () if there
            are no such lines.
    """
    for name, words in PARTS.items():
        why = _unpicklable(parts.get(name))
        if why:
            return f"the {words} cannot be sent to workers that are not forked: {why}"
    return _unguarded(main_line, sorted(began_lines))


def main_line() -> Optional[int]:
    """Returns the line of the main module that led here; None if the call began elsewhere.

    Elsewhere means in a thread, or in a process that was itself started by spawn. The line is found under coverage and
    `runpy.run_path`, too: these run a program in their own process and install its module as the main module.
    """
    main, line = sys.modules.get("__main__"), None
    frame: Any = sys._getframe(1) if getattr(main, "__file__", None) else None  # None for `python -c` and in spawned processes
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(main):
            line = frame.f_lineno
        frame = frame.f_back
    return line


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
    """Pickles as for a new process, but leaves tensors out: they can always be sent, and would be moved into shared memory."""

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


def _unguarded(made_line: Optional[int], began_lines: List[int]) -> str:
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None) or ""
    name = getattr(getattr(main, "__spec__", None), "name", None) or os.path.splitext(os.path.basename(path))[0]
    source = "".join(linecache.getlines(path))
    if name.rpartition(".")[2] == NEVER_IMPORTED or not source:
        return ""  # workers do not import this main module, or it has no file (`python -c`)
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the file has changed since the start
        return ""
    if _compares_name_in_function(tree):
        return ""  # `if is_main(): ...`, which cannot be analysed
    guards = _guards(tree)
    lines = began_lines or ([] if made_line is None or (guards and _is_assigned(tree, made_line)) else [made_line])
    if all(any(_covers(each, line) for each in guards) for line in lines):
        return ""
    return UNGUARDED.format(os.path.basename(path), OUTSIDE if guards else NO_GUARD)


def _guards(tree: ast.Module) -> List[ast.AST]:
    """Returns the nodes that depend on the module's name, at any level: `if __name__ == ...`, `__name__ == ... and main()`."""
    names = {"__name__"}  # and variables set from it: is_main = __name__ == "__main__"
    for each in ast.walk(tree):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Compare) and _mentions(each.value, names):
            names |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    tested = (
        (each, each.values[0] if isinstance(each, ast.BoolOp) else getattr(each, "test", None)) for each in ast.walk(tree)
    )
    return [each for each, test in tested if test is not None and not isinstance(each, ast.Assert) and _mentions(test, names)]


def _compares_name_in_function(tree: ast.Module) -> bool:
    functions = (each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.Lambda)))
    return any(isinstance(each, ast.Compare) and _mentions(each, {"__name__"}) for one in functions for each in ast.walk(one))


def _mentions(test: ast.AST, names: Set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(test))


def _covers(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))


def _is_assigned(tree: ast.Module, line: int) -> bool:
    """Whether a line only assigns something (`loader = ...`), so that it does not show where the assigned object is used."""
    return any(isinstance(each, (ast.Assign, ast.AnnAssign)) and _covers(each, line) for each in ast.walk(tree))
