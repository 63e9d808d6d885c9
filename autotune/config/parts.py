"""Checks that the user's own parts of a recipe (PACKAGE.MODULE:FUNCTION) exist, before anything is trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from autotune.config.locate import program
from autotune.config.recipe import CUSTOM, PARTS, parts_of
from autotune.config.schema import StudyConfig
from autotune.knobs.values import shown

REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
CHECK_S = 120.0  # time limit for importing the module and all that it imports
FORM = "Allowed: PACKAGE.MODULE:FUNCTION, searched for in the working directory first. Give one that exists."


def problems_of_parts(config: StudyConfig) -> list[str]:
    """Returns what is wrong with the references to the user's code. The recipe's interpreter imports the code to check them."""
    parts = parts_of(config)
    wrong = [
        f"{key}: not a reference to a function, got {shown(reference)}. {FORM}"
        for key, reference in parts.items()
        if not REFERENCE.fullmatch(reference)
    ]
    if wrong or not parts:
        return wrong
    said = _check(config.program.python or sys.executable, parts)
    return [
        f"{key}: cannot be used, got {shown(reference)} ({said[reference]}). {FORM}"
        for key, reference in parts.items()
        if reference in said
    ]


def _check(python: str, parts: dict[str, str]) -> dict[str, str]:
    """Returns reference -> problem, as reported by the recipe's script; {} if the interpreter cannot be started."""
    references = list(parts.values())
    called = [word for flag, key in PARTS.items() if key in parts for word in (flag, parts[key])]
    try:
        done = subprocess.run(
            [python, str(program(CUSTOM)), *called, "--check", *references],
            cwd=os.getcwd(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_S,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(references, f"importing it takes more than {CHECK_S:.0f} s")
    except (OSError, ValueError):  # `checks.problems_of` reports an interpreter that does not exist
        return {}
    lines = done.stderr.splitlines()
    found = {each: line.removeprefix(f"{each}: ") for each in references for line in lines if line.startswith(f"{each}: ")}
    if done.returncode and not found:
        last = lines[-1].strip() if lines else "no output"
        return {references[0]: f"importing it ended Python with exit code {done.returncode}: {last}"}
    return found
