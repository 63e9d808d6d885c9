"""Finds out which libraries a warm server may import for the program, besides torch (see warm_server.py).

`Libraries` notes the imports of installed libraries that the program itself causes, in their order, until it trains. An import
inside another import is not noted, because the server repeats it when it imports the outer library. The server runs no code of
the program. So the list ends at the first import that could give a different result in the server: the program has changed
something that imports read, or the import has done something that a fork cannot repeat.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.abc
import importlib.machinery
import json
import os
import pickle
import random
import sys
import threading
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple
from urllib.parse import unquote

from . import adapters, state
from .patches import Awaited

INSTALLED = ("site-packages", "dist-packages")  # folders of installed libraries
STANDARD = os.path.dirname(os.__file__) + os.sep
# A loader of one of these classes loads a single module. Other loaders may come from import hooks of the program.
LOADERS = (importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader)
MOST_DRAWN = 1000  # an import that draws more random numbers is not repeated by the server
OWN = ("autotune", __name__.partition(".")[0])


class Libraries(importlib.abc.MetaPathFinder):
    """A finder that finds modules as the later finders would, and notes the outermost imports of installed libraries.

    Attributes:
        seconds: module -> how long its import took, in the order of the imports.
        has_torch: whether one of these imports imported torch. If so, all changes of the environment before the import of torch
            were made by these imports.
    """

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}
        self.has_torch = False
        self._is_over = self._is_finding = self._is_importing = self._is_shadowed = False
        self._thread = threading.get_ident()
        self._path = list(sys.path)
        self._script_folder: Optional[str] = None  # the folder that the interpreter puts first on sys.path for the program
        self._settings, self._drawn = _settings(), random.getstate()
        self._seen = set(sys.modules)
        self._developed = _developed()

    def find_spec(self, fullname: str, path: Optional[Sequence[str]], target: Any = None) -> Any:
        """Returns the module's spec, if this import is to be noted; None otherwise."""
        if self._is_over or self._is_finding or threading.get_ident() != self._thread or self not in sys.meta_path:
            return None
        if self._is_importing:
            if path is None and not self._is_shadowed:
                self._is_shadowed = bool(self._guarded(lambda: self._is_in_script_folder(fullname)))
            return None
        self._is_finding = True
        try:
            return self._find_spec(fullname, path, target)
        finally:
            self._is_finding = False

    def _find_spec(self, fullname: str, path: Optional[Sequence[str]], target: Any) -> Any:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if type(spec.loader) in LOADERS and self._is_installed(fullname, spec.origin):
                    Awaited(fullname, lambda execute, _: self._import(fullname, execute)).wrap(spec.loader)
                return spec
        return None

    def _import(self, name: str, execute: Callable[[], None]) -> None:
        if self._is_over or self._is_importing or threading.get_ident() != self._thread:
            execute()
            return
        effects = self._guarded(lambda: _effects() if self._is_as_after_last_import() else None)
        began_s = time.perf_counter()
        self._is_importing = True
        try:
            execute()
        finally:
            self._is_importing = False
        seconds = time.perf_counter() - began_s
        settings = self._guarded(lambda: _settings() if effects is not None and self._is_repeatable(name, effects) else None)
        if settings is None:
            self._is_over = True
            return
        self.seconds[name] = seconds
        self.has_torch = "torch" in sys.modules
        self._settings, self._path, self._drawn = settings, list(sys.path), random.getstate()

    def _guarded(self, look: Callable[[], Any]) -> Any:
        # An error of this module must not be an error of the program's import.
        try:
            return look()
        except Exception:
            self._is_over = True
            return None

    def _is_repeatable(self, name: str, before: Tuple[Any, ...]) -> bool:
        """Whether a server that imports this before it forks gives its trials the same state as this process has now."""
        is_own = any(self._is_own(each) for each in self._new_modules())
        # The import of torch counts as repeatable, although the harness begins in it and may set seeds. Whether the server may
        # import torch is decided elsewhere.
        after = _effects()
        if before[0] == self._drawn and _is_drawn(before[0], after[0]):
            before = (after[0], *before[1:])  # no seed was set, so the generator's numbers differ in each process anyway
        is_same = name == "torch" or _is_unchanged(before, after)
        return is_same and not is_own and not self._is_shadowed and not adapters.TRACKERS & sys.modules.keys()

    def _is_as_after_last_import(self) -> bool:
        if not self.seconds and self._script_folder is None and sys.path[1:] == self._path:
            self._script_folder, self._path = sys.path[0], list(sys.path)
        is_hiding = any("." not in name and self._is_own(name) and _is_hiding(name) for name in self._new_modules())
        return not is_hiding and sys.path == self._path and _settings() == self._settings

    def _new_modules(self) -> List[str]:
        """Returns the names of the modules that were imported since the last call."""
        new = [name for name in list(sys.modules) if name not in self._seen]
        self._seen.update(new)
        return new

    def _is_own(self, name: str) -> bool:
        """Whether a module is the program's own code, or not known to be anything else."""
        if name.partition(".")[0] in (*OWN, "__main__", "__mp_main__"):
            return False
        names = getattr(sys.modules.get(name), "__dict__", None) or {}
        places = [names["__file__"]] if names.get("__file__") else list(names.get("__path__") or ())
        return not all(str(place).startswith(STANDARD) or self._is_installed(name, str(place)) for place in places)

    def _is_installed(self, name: str, place: Optional[str]) -> bool:
        return bool(place) and _is_library(str(place)) and name.partition(".")[0] not in (*OWN, *self._developed)

    def _is_in_script_folder(self, name: str) -> bool:
        """Whether Python finds a module in the script's folder, which is not on the server's path."""
        if self._script_folder is None or _find(name, [self._script_folder]) is None:
            return False
        found = _find(name, sys.path)  # installed packages come before folders without __init__.py
        return found is None or not _is_library(str(found.origin))


def begin() -> None:
    """Begins to note imports."""
    global _libraries
    _libraries = Libraries()
    sys.meta_path.insert(0, _libraries)


def end() -> None:
    """Stops noting imports, and adds the noted imports to `state.startup`."""
    global _libraries
    if _libraries is not None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _libraries]
        state.startup["imports"] = {name: round(seconds, 2) for name, seconds in _libraries.seconds.items()}
        state.startup["is_repeatable"] = _libraries.has_torch
        _libraries = None


def loaded() -> List[Any]:
    """Returns the imported modules of installed libraries, except torch's: every start imports torch before it patches."""
    found = []
    for name, module in list(sys.modules.items()):
        place = (getattr(module, "__dict__", None) or {}).get("__file__")
        if place and _is_library(str(place)) and name.partition(".")[0] not in (*OWN, "torch", "torchvision"):
            found.append(module)
    return found


def _is_library(place: str) -> bool:
    return any(part in INSTALLED for part in place.split(os.sep))


def _is_hiding(name: str) -> bool:
    """Whether a module of the program hides an installed module of this name, which the server would import instead."""
    found = _find(name, [path for path in sys.path if _is_library(path)])
    return found is not None and found.origin != getattr(sys.modules.get(name), "__file__", None)


def _find(name: str, path: Sequence[str]) -> Any:
    return importlib.machinery.PathFinder.find_spec(name, list(path))


def _developed() -> Set[str]:
    """Returns the user's own packages: the package that `python -m` runs, and those installed from a local folder."""
    words: List[str] = getattr(sys, "orig_argv", [])
    found = {words[2].partition(".")[0]} if words[1:2] == ["-m"] and len(words) > 2 else set()
    for place in filter(_is_library, sys.path):
        for path in glob.glob(os.path.join(glob.escape(place), "*.dist-info", "direct_url.json")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                with open(path, encoding="utf-8") as file:
                    source = json.load(file)
                if "dir_info" in source and os.path.isdir(unquote(source["url"]).replace("file://", "", 1)):
                    with open(os.path.join(os.path.dirname(path), "RECORD"), encoding="utf-8") as file:
                        found.update(line.split(",")[0].split("/")[0].partition(".")[0] for line in file)
    return found


def _settings() -> Tuple[Any, ...]:
    """Returns the settings that a program can change and that importing a library may read."""
    logging, torch = sys.modules.get("logging"), sys.modules.get("torch")
    root = getattr(logging, "root", None)
    devices = getattr(getattr(torch, "utils", None), "_device", None)
    return (
        {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE_")},
        os.getcwd(),
        list(warnings.filters),
        warnings.showwarning,
        [finder for finder in sys.meta_path if not isinstance(finder, (Awaited, Libraries))],
        list(sys.path_hooks),
        (30, [], 0) if root is None else (root.level, list(root.handlers), root.manager.disable),
        torch.get_default_dtype() if hasattr(torch, "get_default_dtype") else None,  # type: ignore[union-attr]
        getattr(devices, "CURRENT_DEVICE", None),
    )


def _effects() -> Tuple[Any, ...]:
    """Returns the states of the random generators (None for those not imported yet), and the number of threads."""
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    state_of_numpy = numpy.get_state(legacy=False) if hasattr(numpy, "get_state") else None  # type: ignore[union-attr]
    return (
        random.getstate(),
        pickle.dumps(state_of_numpy) if state_of_numpy else None,
        torch.get_rng_state() if hasattr(torch, "get_rng_state") else None,  # type: ignore[union-attr]
        threading.active_count(),
    )


def _is_unchanged(before: Tuple[Any, ...], after: Tuple[Any, ...]) -> bool:
    """Whether no generator was used or set, and no thread was started, between two results of `_effects`."""
    of_random, of_numpy, of_torch, num_threads = before
    is_torch_same = of_torch is None or sys.modules["torch"].equal(of_torch, after[2])
    return of_random == after[0] and of_numpy in (None, after[1]) and is_torch_same and num_threads == after[3]


def _is_drawn(before: Tuple[Any, ...], after: Tuple[Any, ...]) -> bool:
    """Whether drawing numbers explains the new state of Python's generator; if it does, nothing has seeded the generator."""
    twin = random.Random()
    twin.setstate(before)
    for _ in range(MOST_DRAWN):
        twin.getrandbits(32)
        if twin.getstate()[1] == after[1]:
            return True
    return False


_libraries: Optional[Libraries] = None
