"""Injects the harness into a trial's Python processes through PYTHONPATH, and finds out why a process did not load it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.harness import protocol

if TYPE_CHECKING:
    import psutil

INJECT = Path(protocol.__file__).resolve().parent / "inject"
# Seconds from a trial's launch until its processes are first examined for what keeps the harness out. Normally the harness
# reports within a Python process's first second.
LATE_S = 20.0
AGAIN_S = 10.0  # seconds between two such examinations
YOUNG_S = 3.0  # a process younger than this may not have loaded the harness yet
PYTHON_PATH = re.compile(r"^PYTHONPATH=(.*)", re.DOTALL)
PYTHON = re.compile(r"python[\d.]*")
# Options with which Python ignores PYTHONPATH or sitecustomize (E, I, S), and options that name the program (c, m). In grouped
# options such as `-Bm`, the letters after c, m, W or X are that option's value.
ISOLATING, RUNS = re.compile(r"-[^-cmWX]*[EIS]"), re.compile(r"-[^-WX]*[cm]")
ISOLATED = "Python is started with {0}, which keeps the harness out. Start it without {0}"
REPLACED = "PYTHONPATH was replaced before Python was started. Let the script add to it: PYTHONPATH=src:$PYTHONPATH"
REPLACES = re.compile(r"^[^#]*?(?<!\w)PYTHONPATH=(?!.*\$\{?PYTHONPATH)")  # shell code that drops its old value


def first_on(python_path: str) -> str:
    """Returns a PYTHONPATH with the harness first. An empty PYTHONPATH is left out: Python would add the current folder."""
    return f"{INJECT}:{python_path}" if python_path else str(INJECT)


def with_harness(argv: Sequence[str]) -> list[str]:
    """Returns the command, with the harness added to arguments that set PYTHONPATH: `env PYTHONPATH=src python train.py`."""
    return [PYTHON_PATH.sub(lambda found: f"PYTHONPATH={first_on(found[1])}", word) for word in argv]


def isolating(words: Sequence[str]) -> str:
    """Returns the option of Python that keeps the harness out; "" if there is none. `words` follow the interpreter."""
    for word in words:
        if ISOLATING.match(word):
            return word
        if not word.startswith("-") or RUNS.match(word):  # the word is or names the program: its arguments follow
            break
    return ""


def why_shut_out(processes: Iterable[psutil.Process]) -> str:
    """Returns what keeps the harness out of one of the processes; "" if nothing is found.

    Only Python processes that are at least YOUNG_S old are examined.
    """
    import psutil  # imported here: `autotune.apply` needs this module in user environments, where psutil may be missing

    for process in processes:
        try:
            if time.time() - process.create_time() < YOUNG_S:
                continue
            is_python = bool(PYTHON.fullmatch(Path(process.exe()).name))
            environment, words = process.environ(), process.cmdline()
        except (psutil.Error, OSError):
            continue
        if not is_python:
            continue
        if protocol.SPEC_VARIABLE not in environment:
            return "the environment was cleared before Python was started"
        if str(INJECT) not in environment.get("PYTHONPATH", "").split(":"):
            return REPLACED
        if option := isolating(words[1:]):
            return ISOLATED.format(option)
    return ""
