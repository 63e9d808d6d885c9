"""Distinguishes the program's own code from libraries and from the harness."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import site
import sys
import sysconfig
import traceback
from typing import Any, Dict, List, Optional, Tuple

OWN, LIBRARY, HARNESS = "own", "library", "harness"
GENERATED = os.sep + "torchinductor_"  # in the path of code that torch.compile writes, unless TORCHINDUCTOR_CACHE_DIR is set
_ENTRY_POINT = re.compile(r"from (\w+)[\w.]* import ")  # imports the function that the script of an entry point calls
_HARNESS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Sources:
    """Determines whose code runs.

    Attributes:
        kinds: code object -> its kind, for all code objects passed to `kind`.
    """

    def __init__(self) -> None:
        self.kinds: Dict[Any, str] = {}
        self._libraries = _library_folders()
        self._main = _main_folder(self._libraries)
        self._is_main_a_string = getattr(sys.modules.get("__main__"), "__file__", None) is None  # python -c

    def kind(self, code: Any) -> str:
        """Returns OWN, LIBRARY or HARNESS for a code object."""
        known = self.kinds.get(code)
        if known is None:
            known = self.kinds[code] = self.kind_of_file(code.co_filename)
        return known

    def kind_of_file(self, file: str) -> str:
        """Returns the kind of the code in a file."""
        if file.startswith("<"):  # compiled from a string, by the user or by a library
            return OWN if file == "<string>" and self._is_main_a_string else LIBRARY
        file = os.path.abspath(file)
        if file.startswith(_HARNESS):
            return HARNESS
        if self._main and file.startswith(self._main):
            return OWN
        return LIBRARY if file.startswith(self._libraries) or GENERATED in file else OWN

    def own_frame(self, frame: Any) -> Any:
        """Returns the innermost frame of the program's own code among a frame and its callers; None if there is none."""
        return next((each for each, _ in traceback.walk_stack(frame) if self.kind(each.f_code) is OWN), None)


def _library_folders() -> Tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__)]
    folders += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    folders += [os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if os.environ.get(name)]
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    folders += [os.path.dirname(torch_file)] if torch_file else []
    return tuple({os.path.abspath(folder) + os.sep for folder in folders})


def _main_folder(libraries: Tuple[str, ...]) -> str:
    """Returns the main module's folder if it is in an installed package, else "". Its files count as the program's own.

    pip writes a script for each entry point. If the main module is such a script, returns the folder of the package that the
    script imports.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return ""
    scripts = (sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user"))
    if os.path.dirname(os.path.realpath(file)) in map(os.path.realpath, scripts):
        package = next((found[1] for found in map(_ENTRY_POINT.match, linecache.getlines(file)) if found), "")
        file = getattr(sys.modules.get(package), "__file__", None) or file
    folder = os.path.dirname(os.path.abspath(file)) + os.sep
    return folder if folder.startswith(libraries) and folder not in libraries else ""


def text_of(file: str, line: int) -> str:
    """Returns a stripped source line; "" if it cannot be read."""
    return linecache.getline(file, line).strip()


def name_of(code: Any) -> str:
    """Returns a function's qualified name; before Python 3.11, "NAME" or, inside another function, "<locals>.NAME"."""
    is_inside = bool(code.co_flags & inspect.CO_NESTED)
    return str(getattr(code, "co_qualname", f"<locals>.{code.co_name}" if is_inside else code.co_name))


def code_of(thing: Any, names: Tuple[str, ...] = ()) -> Optional[Any]:
    """Returns the code of a function, or of the first of the methods `names` that an object has; None if there is none."""
    functions: List[Any] = [thing, *(getattr(type(thing), name, None) for name in names)]
    for function in functions:
        function = getattr(function, "__wrapped__", function)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            return code
    return None
