"""Decides where a command writes its file, and writes it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from autotune.errors import BadInput
from autotune.run_dir import beside, check_output

STDOUT = "-"


def output_file(typed: str | None, name: str) -> Path | None:
    """Returns the file that `-o` names, or None for standard output. In an existing folder, the file gets the usual name.

    Args:
        typed: the value of `-o`; None if it was not given.
        name: the usual name of the file.

    Raises:
        BadInput: the value is empty, or a folder that does not exist.
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
    """Writes a file and makes its parent folders. The old content stays until the new content is complete.

    Raises:
        BadInput: it cannot be written, or it is a record of a study.
    """
    write_bytes(text.encode("utf-8", "backslashreplace"), file, "--output")  # a file name may contain bytes that are not UTF-8


def write_bytes(content: bytes, file: Path, option: str) -> None:
    """Writes a file as `write` does.

    Args:
        content: its content.
        file: the file.
        option: the option that named it.

    Raises:
        BadInput: as `write`.
    """
    check_output(file, option)
    is_special = file.exists() and not file.is_file()  # such as /dev/full, which cannot be replaced
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if is_special:
            file.write_bytes(content)
            return
        descriptor, temporary = beside(file, 0o666)
        with open(descriptor, "wb") as written:
            written.write(content)
        temporary.replace(file)
    except OSError as error:
        if temporary:
            temporary.unlink(missing_ok=True)
        raise BadInput(f"{option}: cannot be written, got {str(file)!r} ({error.strerror}). Give another file.") from error
