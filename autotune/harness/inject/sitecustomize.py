"""Starts the harness in a trial's Python processes, then runs the next sitecustomize on the path (Debian ships one).

Python runs this module at its start, because its folder comes first on a trial's PYTHONPATH.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _wake(spec_path: str) -> None:
    package = os.path.dirname(_HERE)
    spec = importlib.util.spec_from_file_location("_autotune_harness", os.path.join(package, "__init__.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"nothing to load in {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["_autotune_harness"] = module
    spec.loader.exec_module(module)
    module.wake(spec_path)


def _chain() -> None:
    elsewhere = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("AUTOTUNE_SPEC"):
    try:
        _wake(os.environ["AUTOTUNE_SPEC"])
    except Exception as error:  # the program must run anyway; the tuner sees that no harness answered
        sys.stderr.write(f"autotune: the harness could not start: {type(error).__name__}: {error}\n")
_chain()
