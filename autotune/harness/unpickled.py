"""Loads the harness by its path, without calling its `wake`, in a loader's worker that unpickles `WorkerInit` (worker.py)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

HARNESS = "_autotune_harness"  # as in protocol.py, which cannot be imported here yet


def worker_init() -> Any:
    """Returns the class `WorkerInit`."""
    if HARNESS not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")
        spec = importlib.util.spec_from_file_location(HARNESS, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"nothing to load in {path}")
        sys.modules[HARNESS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[HARNESS])
    return importlib.import_module(f"{HARNESS}.worker").WorkerInit
