"""Decides where a command writes its file, and writes it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from autotune.errors import BadInput
from autotune.run_dir import check_output

STDOUT = "-"


def output_file(typed: str | None, name: str) -> Path | None:
    """Returns the file that `-o` names, or None for standard output. A folder that exists takes a file of the usual name.

    Args:
        typed: as typed; None if it was not.
        name: the usual name of the file.

    Raises:
        BadInput: it names no file, or a folder that does not exist.
    """
    if typed is None or typed == STDOUT:
        return None
    if not typed:
        raise BadInput(f"--output: no file, got ''. Give a file: -o {name}.")
    if os.path.isdir(typed):
        return Path(typed) / name
    if typed.endswith(os.sep):
        made = shlex.quote(typed)
        raise BadInput(f"--output: no such folder, got {typed!r}. Make it with `mkdir -p {made}`, or give a file: -o {name}.")
    return Path(typed)


def write(text: str, file: Path) -> None:
    """Writes a file, and the folders that it lies in.

    Raises:
        BadInput: it cannot be written, or it is a record of a study.
    """
    check_output(file, "--output")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--output: cannot be written, got {str(file)!r} ({error.strerror}). Give another: -o FILE.") from error
