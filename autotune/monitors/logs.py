"""Reads the end of a trial's log and bounds the log's size. Callers mask secrets before they pass the text on."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from autotune.plain_text import plain

TAIL_BYTES = 8 << 10
MAX_BYTES = 8 << 20
HEAD_BYTES, KEEP_BYTES = 256 << 10, 1 << 20  # of a log larger than MAX_BYTES, this much of the beginning and of the end is kept
COLLAPSE_RANGE, ALIGN_BYTES = 0x08, 64 << 10  # a flag of fallocate(2); a multiple of the block size of any usual file system


def tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """Returns the end of a text file as plain text, starting at a full line; "" if there is no file. Secrets are not masked."""
    try:
        if not path.is_file():  # reading a pipe could block
            return ""
        with path.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - max_bytes))
            end = file.read(max_bytes)
    except OSError:
        return ""
    # Drop the partial line at the start, but keep a single endless line.
    kept = end[end.find(b"\n") + 1 :] if size_bytes > max_bytes else end
    return plain(kept.decode("utf-8", errors="replace"))


def bound(path: Path) -> None:
    """Cuts a log that has grown past MAX_BYTES back to its beginning and its end, even while the program writes to it.

    Writers must have opened the log for appending, so that they continue at its new end. On ext4 and XFS, Linux can remove the
    middle of a file in one step. Elsewhere the end is copied: what the program writes during the copy is kept, but what it
    writes between the last read and the cut is lost. With a pipe instead of a file, nothing would be lost. But then each print
    of the program would wait for the reader of the pipe, and the reader's death would end the program.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES and not _take_out_middle(path, size_bytes):
            _copy_end(path, size_bytes)
    except OSError:
        return  # the folder is gone, or the disk is full


def _take_out_middle(path: Path, size_bytes: int) -> bool:
    """Removes the middle of a file without a copy; returns False if the file system cannot (fallocate(2), COLLAPSE_RANGE)."""
    length = (size_bytes - HEAD_BYTES - KEEP_BYTES) // ALIGN_BYTES * ALIGN_BYTES  # whole blocks, as fallocate requires
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    with path.open("r+b", buffering=0) as file:
        if fallocate is None or fallocate(file.fileno(), COLLAPSE_RANGE, ctypes.c_int64(HEAD_BYTES), ctypes.c_int64(length)):
            return False
        note = _note(length + len(_note(length)))  # the note also counts the bytes that it overwrites
        near = os.pread(file.fileno(), 2 * ALIGN_BYTES, HEAD_BYTES - ALIGN_BYTES)
        # Lines that the cut or the note splits are overwritten: half a secret would not be recognised and masked.
        begin = near.rfind(b"\n", 0, ALIGN_BYTES) + 1 or ALIGN_BYTES
        end = begin + len(note)
        next_line = near.find(b"\n", max(ALIGN_BYTES, end) - 1) + 1
        rest = b"." * (next_line - end - 1) + b"\n" if next_line > end else b""
        os.pwrite(file.fileno(), note + rest, HEAD_BYTES - ALIGN_BYTES + begin)
    return True


def _copy_end(path: Path, size_bytes: int) -> None:
    """Truncates the file after its beginning and appends a copy of its end."""
    with path.open("rb") as file, path.open("ab", buffering=0) as cut:
        head_bytes = file.read(HEAD_BYTES).rfind(b"\n") + 1 or HEAD_BYTES  # whole lines: half a secret would not be masked
        file.seek(size_bytes - KEEP_BYTES)
        end = file.read()
        for _ in range(8):  # eight times at most, since a flood of output may never pause
            size_bytes, end = file.tell(), end[-KEEP_BYTES:]
            if not (more := file.read()):
                break
            end += more
        end = end[end.find(b"\n") + 1 :]  # drop the partial line at the start
        os.ftruncate(cut.fileno(), head_bytes)
        cut.write(_note(size_bytes - head_bytes - len(end)) + end)


def _note(num_bytes: int) -> bytes:
    return b"\n[autotune: %d bytes left out here]\n" % num_bytes
