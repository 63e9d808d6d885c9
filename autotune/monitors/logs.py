"""Reads the end of a trial's log and bounds the log's size. Callers mask secrets before they pass the text on."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.plain_text import plain

TAIL_BYTES = 8 << 10
MAX_BYTES = 8 << 20
HEAD_BYTES, KEEP_BYTES = 256 << 10, 1 << 20  # kept of the beginning and of the end of a log larger than MAX_BYTES


def tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """Returns the end of a text file as plain text, starting at a full line; "" if there is no file. Secrets are not masked."""
    try:
        return plain(_end(path, max_bytes).decode("utf-8", errors="replace"))
    except OSError:
        return ""


def bound(path: Path) -> None:
    """Cuts a log that has grown past MAX_BYTES back to its beginning and its end, even while the program writes to it.

    Writers must have opened the log for appending, so they continue at its end. What they write while the file is read is
    kept; what they write in the microseconds between the last read and the cut is lost. A pipe would lose nothing, but then
    each print of the program would wait for our reader, and the reader's death would end the program.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes <= MAX_BYTES:
            return
        with path.open("rb") as file, path.open("ab", buffering=0) as cut:
            file.seek(size_bytes - KEEP_BYTES)
            end = file.read()
            for _ in range(8):  # eight times at most, since a flood of output may never pause
                size_bytes, end = file.tell(), end[-KEEP_BYTES:]
                if not (more := file.read()):
                    break
                end += more
            end = end[end.find(b"\n") + 1 :]  # drop the partial line at the start
            os.ftruncate(cut.fileno(), HEAD_BYTES)
            cut.write(b"\n[autotune: %d bytes left out here]\n" % (size_bytes - HEAD_BYTES - len(end)) + end)
    except OSError:
        return  # the folder is gone, or the disk is full


def _end(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - max_bytes))
        end = file.read(max_bytes)
    # Drop the partial line at the start, but keep a single endless line.
    return end[end.find(b"\n") + 1 :] if size_bytes > max_bytes else end
