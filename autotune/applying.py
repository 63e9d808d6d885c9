"""Implements `autotune.apply`, for programs that call autotune themselves.

This module is imported in the user's own process, so it needs only the standard library and, to read the file, PyYAML.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

from autotune.harness import protocol

# Variables that the dynamic loader, the C library or Python read when a process starts.
READ_AT_START = re.compile(r"LD_\w+|MALLOC_\w+|GLIBC_\w+|PYTHON\w+")


def apply(file: str | os.PathLike[str]) -> None:
    """See `autotune.apply`."""
    if os.environ.get(protocol.SPEC_VARIABLE):
        _leave_out(os.fspath(file))
        return
    from autotune.config.best_file import read_best
    from autotune.launchers.real_run import announce, spec_text, variables

    best = read_best(Path(file))
    passed, problems = best.handed_over(sys.argv[1:])
    spec = spec_text(best, passed=passed, late=_late(best.open_knobs))
    os.environ.update(variables(best, spec))  # child processes inherit them, too
    if multiprocessing.parent_process() is None:
        announce(best, problems)
    _harness().join(spec)


def _leave_out(file: str) -> None:
    """Prints that the file is ignored, because a trial or `autotune apply` sets the knobs already.

    Prints nothing if `autotune apply` was given a file of the same name.
    """
    if multiprocessing.parent_process() is not None or protocol.launched_rank(os.environ) != 0:
        return
    if not protocol.is_real_run(os.environ):
        print(f"autotune: {file} is ignored: this is a trial, which has its own settings", file=sys.stderr)
        return
    applied = protocol.read_spec(os.environ[protocol.SPEC_VARIABLE]).origin
    if applied != os.path.basename(file):
        print(f"autotune: {file} is ignored: {applied} is already applied", file=sys.stderr)


def _late(knobs: dict[str, Any]) -> dict[str, str]:
    """Returns {knob: reason} for the knobs whose environment variables this process or its torch has already read."""
    from autotune.knobs.catalogue import knob

    instead = "use `autotune apply FILE -- COMMAND`"
    late = {}
    for key, value in knobs.items():
        for name, text in knob(key).environment(value).items():
            if os.environ.get(name) == text or name in knob(key).set_later:
                continue
            if READ_AT_START.fullmatch(name):
                late[key] = f"{name} is read only when a process starts: {instead}"
            elif "torch" in sys.modules:
                late[key] = f"torch was imported earlier and has read {name}: call autotune.apply() before that, or {instead}"
    return late


def _harness() -> Any:
    """Returns the harness, loaded as in a trial: by its path, under the name protocol.HARNESS."""
    if protocol.HARNESS not in sys.modules:
        package = Path(protocol.__file__).resolve().parent
        found = importlib.util.spec_from_file_location(
            protocol.HARNESS, package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[protocol.HARNESS] = module
        found.loader.exec_module(module)
    return sys.modules[protocol.HARNESS]
