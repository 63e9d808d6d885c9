"""Probes an interpreter for torch and what torch.compile needs. The program's interpreter runs this file by path.

It needs only the standard library and Python 3.9, because autotune is not installed there. Importing torch takes seconds.
Without `--import`, torch's version is read from its version.py instead.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import runpy
import sys
import sysconfig
import time
import warnings
from typing import Any


def look(with_import: bool) -> dict[str, Any]:
    """Returns what this interpreter has.

    Returns:
        "python", "executable", "torch" (version; None if missing), "cuda" (version that torch was built for), "has_header"
        (Python.h), "has_triton", "problem" (why torch cannot be examined, or "");
        with torch also "bytecode" (why each process has to compile torch's Python code itself; "" if it need not) and
        "libraries" (the folder that torch is in);
        after an import of torch also "arch_list", "is_available", "why_not_available", "import_s" and "nccl" (version,
        [2, 27, 3]).
    """
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": None,
        "cuda": None,
        "has_header": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
        "has_triton": importlib.util.find_spec("triton") is not None,
        "problem": "",
    }
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return found
    try:
        if spec.origin is None:
            raise ImportError("a folder named torch, not the library, comes first on the path")
        said = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py"))
        found["torch"], found["cuda"] = str(said["__version__"]), said.get("cuda")
        found["libraries"] = os.path.dirname(os.path.dirname(spec.origin))
        found["bytecode"] = _why_compiled_anew(spec)
        if with_import:
            found.update(_imported())
    except Exception as error:  # a broken installation may raise anything
        found["problem"] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return found


def _why_compiled_anew(spec: importlib.machinery.ModuleSpec) -> str:
    """Returns why a module has no stored bytecode and will get none; "" if there is some, or if Python can store it."""
    if not spec.cached or os.path.exists(spec.cached):
        return ""
    if sys.dont_write_bytecode:
        return "PYTHONDONTWRITEBYTECODE is set"
    folder = os.path.dirname(os.path.abspath(spec.cached))  # PYTHONPYCACHEPREFIX may be relative
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return "" if os.access(folder, os.W_OK) else f"{folder} is read-only"


def _imported() -> dict[str, Any]:
    begun_s = time.monotonic()
    import torch

    found: dict[str, Any] = {"import_s": time.monotonic() - begun_s, "nccl": None}
    with warnings.catch_warnings(record=True) as caught:  # is_available() gives the reason in a warning
        warnings.simplefilter("always")
        found["is_available"] = bool(torch.cuda.is_available())
    reasons = [str(warning.message).strip().splitlines()[0] for warning in caught]
    found["why_not_available"] = reasons[-1] if reasons else ""
    found["arch_list"] = list(torch.cuda.get_arch_list()) if found["is_available"] else []
    with contextlib.suppress(Exception):  # a build without NCCL
        found["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


if __name__ == "__main__":
    print(json.dumps(look("--import" in sys.argv[1:])))
