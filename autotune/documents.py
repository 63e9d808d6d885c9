"""Reads and writes documents, completely or not at all.

Only regular files are read: a study may come from a stranger, and reading a pipe or a device could block.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from autotune.plain_text import storable
from autotune.shapes import finite

MAX_BYTES = 256 << 20  # no document is larger; a trial adds about 2 KiB to a summary


def write_text(path: Path, text: str) -> None:
    """Writes a document as `write_bytes` does; only the file's owner may read it."""
    write_bytes(path, storable(text).encode())


def write_bytes(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Writes a file atomically: under a temporary name, which it then renames. A reader never sees half of the file.

    The temporary name is random and must not exist before, so another user cannot redirect the writing with a link of that
    name in a shared folder. Once this function returns, the file survives a power loss.
    """
    temporary = path.with_name(f"{path.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent)


def make_folder(path: Path) -> None:
    """Makes a folder and its parents unless they exist. Once this function returns, the folder survives a power loss."""
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for above in (path.parent, path.parent.parent):
            _sync(above)


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON document as `write_text` does."""
    write_text(path, as_json(document))


def as_json(document: Any) -> str:
    """Returns a document as it is stored, with a line for each key of a mapping.

    The text is not indented further: indenting makes the json module far slower, and the summary is written often.
    """
    if not isinstance(document, dict) or not document:
        return json.dumps(document)
    return "{\n" + ",\n".join(json.dumps({key: value})[1:-1] for key, value in document.items()) + "\n}"


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `max_bytes`, or it is a pipe or a device, where reading could block or never end.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # opening a folder raises a clear error
        raise ValueError("it is not a file")
    if status.st_size > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: as in `read_bytes`, or the text is not UTF-8.
    """
    return read_bytes(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """Returns a JSON document, with None for numbers that are not finite; see `finite`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or not a regular file.
    """
    return parsed(read_text(path))


def parsed(text: str) -> Any:
    """Returns the document in a JSON text, with None for numbers that are not finite; see `finite`.

    Raises:
        ValueError: the text is not JSON.
    """
    is_finite = True

    def noted(digits: str) -> float:
        nonlocal is_finite
        value = float(digits)
        is_finite = is_finite and math.isfinite(value)
        return value

    try:
        document = json.loads(text, parse_float=noted, parse_constant=noted)
        return document if is_finite else finite(document)
    except RecursionError:
        raise ValueError("nested too deeply") from None
