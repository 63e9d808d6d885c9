"""An import hook that acts when a module is executed, not when its spec is looked up."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any, Callable, Optional, Sequence


class Awaited(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders would, and has `around` execute it the first time.

    `importlib.util.find_spec`, which libraries call, gets a spec without using up the hook: the hook removes itself only
    inside `exec_module`.

    Args:
        name: dotted name of the module.
        around: called with a function that executes the module, and with the module. It must call the function.
    """

    def __init__(self, name: str, around: Callable[[Callable[[], None], Any], None]) -> None:
        self.name = name
        self._around = around

    def find_spec(self, fullname: str, path: Optional[Sequence[str]], target: Any = None) -> Any:
        """Returns the module's spec with the wrapped loader; None for every other module."""
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self.wrap(spec.loader)
                return spec
        return None

    def wrap(self, loader: Any) -> None:
        """Has `around` execute the module that a loader executes next."""
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            if loader.__dict__.get("exec_module") is exec_module:
                del loader.exec_module  # the module's __spec__.loader is the plain loader again
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._around(lambda: execute(module), module)

        loader.exec_module = exec_module
