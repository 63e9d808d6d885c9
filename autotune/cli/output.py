"""Decides where a command writes its file, and writes it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from autotune import documents
from autotune.errors import BadInput
from autotune.studies import around, check_output

STDOUT = "-"
# Marks in the first bytes of autotune's own exports, reports and pictures.
OURS = (b"# autotune: the best configuration", b'content="autotune ', b"Software\0autotune")
HEAD_BYTES = 4096


def output_file(typed: str | None, name: str) -> Path | None:
    """Returns the file that `-o` names, or the file `name` in the folder that `-o` names; None for standard output.

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


def write(text: str, file: Path) -> str:
    """Writes a file, makes its parent folders, and returns a line about both: "wrote out/best.yaml, in the new folder out".

    The old content stays until the new content is complete.

    Raises:
        BadInput: it cannot be written, or it is a record of a study.
    """
    made = next((folder for folder in reversed(file.parents) if not os.path.exists(folder)), None)
    write_bytes(encoded(text), file, "--output")
    return f"wrote {file}" + (f", in the new folder {made}" if made else "")


def check_ours(content: bytes, file: Path, option: str = "--output") -> None:
    """Checks that a file may be replaced: it is missing, empty, equal to `content`, or has a mark (OURS) near its beginning.

    Exports without comments, such as `ds_config.json`, contain no mark, so only the same content may replace them.

    Raises:
        BadInput: it has other content, or is a record of a study.
    """
    check_output(file, option)
    try:
        if not file.is_file():
            return
        with file.open("rb") as opened:
            old = opened.read(len(content) + HEAD_BYTES)
    except OSError:
        return  # `write` reports the problem
    if old and old != content and not any(mark in old[:HEAD_BYTES] for mark in OURS):
        raise BadInput(
            f"{option}: the file exists and does not look like one of autotune's, got {str(file)!r}. Give another file, or "
            "--force to replace it."
        )


def encoded(text: str) -> bytes:
    """Returns the content of a text file, in UTF-8 whatever the locale."""
    return text.encode("utf-8", "backslashreplace")  # a file name may contain bytes that are not UTF-8


def write_bytes(content: bytes, file: Path, option: str) -> None:
    """Writes a file as `write` does.

    Args:
        content: its new content.
        file: the file.
        option: the option with which the user gave the file, for error messages.

    Raises:
        BadInput: as `write`.
    """
    check_output(file, option)
    # Content is written into a pipe or a device such as /dev/full. But in a study's folder, which a stranger may have made, a
    # regular file replaces the pipe or device.
    is_special = os.path.exists(file) and not file.is_file() and around(file) is None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if is_special:
            file.write_bytes(content)
        else:
            documents.write_bytes(file, content, mode=0o666)
    except OSError as error:
        raise BadInput(f"{option}: cannot be written, got {str(file)!r} ({error.strerror}). Give another file.") from error
