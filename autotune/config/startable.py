"""Detects commands that certainly cannot start, without running any part of them."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
from pathlib import Path

from autotune.config.wrapped_commands import ASSIGNMENT, Program, program_of
from autotune.errors import one_of
from autotune.knobs.values import shown

EXAMPLE = "Give the training command after --: -- python train.py."
HEAD_BYTES = 256  # number of bytes that Linux reads to find out how to run a file
USUAL = ("python", "python3", "torchrun", "accelerate", "deepspeed", "bash", "sh", "env")  # first words of commands
ELF = b"\x7fELF"


def startable(command: list[str], cwd: Path) -> list[str]:
    """Returns what is wrong with a command; [] if it may start.

    Modules are not looked up, since only the command's interpreter knows where they are.
    """
    if not command[0] or "\0" in "".join(command):
        return [f"COMMAND: an empty name or a NUL character in it, got {shown(shlex.join(command))}. {EXAMPLE}"]
    if problem := _first_word(command[0], cwd):
        return [problem]
    program = program_of(command)
    if program.missing:
        return [f"COMMAND: nothing to run, got {shown(shlex.join(command))}. Give {program.missing}. {EXAMPLE}"]
    if program.module is not None:
        return _module(program.module, cwd)
    if program.script is None or program.by == "system" or not program.is_certain or "{" in program.script:
        return []
    return _script(program, program.script, cwd)


def _first_word(name: str, cwd: Path) -> str | None:
    found = str(cwd / name) if "/" in name else shutil.which(name)
    if found and os.path.isfile(found) and os.access(found, os.X_OK):
        reason = _not_runnable(found)
        return f"COMMAND: cannot be run by itself, got {shown(name)} ({reason}). {_by_hand(name)}" if reason else None
    here = str(cwd / name)
    if os.path.isfile(here):
        return f"COMMAND: no such program, got {shown(name)}. {_by_hand(name)}"
    if os.path.isdir(here):
        return f"COMMAND: a folder, not a program, got {shown(name)}. {EXAMPLE}"
    if ASSIGNMENT.fullmatch(name):
        write = f"`env {shlex.quote(name)} python train.py`"
        return f"COMMAND: no such program, got {shown(name)}. No shell reads the command: write {write}."
    if " " in name and shutil.which(next(iter(name.split()), "")):
        return f"COMMAND: no such program, got {shown(name)}. Leave out the quotes: each word is an argument of its own."
    close = difflib.get_close_matches(name, USUAL, n=1)
    hint = f"Did you mean {close[0]!r}? " if close and close[0] != name else ""
    return f"COMMAND: no such program, got {shown(name)}. {hint}Give a program on PATH, or a path to one."


def _by_hand(name: str) -> str:
    starter = {".py": "python", ".sh": "bash"}.get(Path(name).suffix)
    return f"Write `{starter} {shlex.quote(name)}`." if starter else f"Make it a program: chmod +x {shlex.quote(name)}."


def _not_runnable(path: str) -> str | None:
    """Returns why Linux cannot run an executable file (no #! line, or one that names a missing program); None if it can."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:  # a file that cannot be read may still be executable
        return None
    if head.startswith(b"#!"):
        words = os.fsdecode(head[2:].partition(b"\n")[0]).strip(" \t").split(" ")
        asked = words[1] if os.path.basename(words[0]) == "env" and len(words) > 1 and words[1][:1] != "-" else words[0]
        there = shutil.which(asked) if asked is not words[0] else os.path.exists(asked)
        return None if there else f"its first line asks for {asked!r}, which does not exist"
    is_text = b"\0" not in head and not head.startswith(ELF)
    return "its first line does not name its interpreter, '#!/usr/bin/env ...'" if is_text else None


def _module(name: str, cwd: Path) -> list[str]:
    if name.endswith(".py") and os.path.isfile(cwd / name):
        plain = name.removesuffix(".py").replace("/", ".")
        return [f"COMMAND: a file, not a module, got {shown(f'-m {name}')}. Write `python {name}` or `python -m {plain}`."]
    if "/" in name or not all(name.split(".")):
        return [f"COMMAND: not a module's name, got {shown(f'-m {name}')}. Write `python -m package.module`."]
    return []


def _script(program: Program, script: str, cwd: Path) -> list[str]:
    path = str(cwd / script)
    if os.path.isdir(path):
        if program.by == "python" and os.path.isfile(os.path.join(path, "__main__.py")):
            return []
        return [f"COMMAND: a folder, not a script, got {shown(script)}. {_nearby_scripts(Path(path), 'train.py')}"]
    if os.path.exists(path):
        return [] if os.access(path, os.R_OK) else [f"COMMAND: cannot be read, got {shown(script)}. Give a readable script."]
    if program.by == "shell" and "/" not in script and shutil.which(script, os.F_OK):  # shells also search PATH
        return []
    near = _nearby_scripts(Path(path).parent, Path(script).name)
    return [f"COMMAND: no such script, got {shown(script)}; looked for in {str(cwd)!r}. {near}"]


def _nearby_scripts(folder: Path, wanted: str) -> str:
    """Returns a hint: the scripts in a folder, with the names most like `wanted` first."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(Path(wanted).suffix or ".py"))
    except OSError:
        names = []
    return one_of(wanted, names, show=4) if names else "Give the path of your training script."
