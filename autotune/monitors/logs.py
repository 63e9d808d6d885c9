"""The end of a trial's log: what goes into evidence, reports and trackers once `masking` has been over it."""

from __future__ import annotations

import os
from pathlib import Path

TAIL_BYTES = 8 << 10
KEEP_BYTES = 1 << 20  # of a log that a trial has flooded


def tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """Returns the end of a text file, cut at a line's start; "" when there is none. Not masked."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            end = file.read(max_bytes)
    except OSError:
        return ""
    if size > max_bytes:
        end = end[end.find(b"\n") + 1 :]  # half a line at the start; one endless line is kept
    return end.decode("utf-8", errors="replace")


def shorten(path: Path, keep_bytes: int = KEEP_BYTES) -> None:
    """Keeps the end of a log that has grown past eight times `keep_bytes`, so that a chatty program does not fill the disk."""
    try:
        if path.stat().st_size <= 8 * keep_bytes:
            return
        end = tail(path, keep_bytes)
        path.write_text(f"[autotune: only the last {keep_bytes} bytes are kept]\n{end}", encoding="utf-8")
    except OSError:
        return
