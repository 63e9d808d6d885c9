"""Probes a data folder: how fast its files are read from their disk, rather than from the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
MAX_BYTES = 256 * MIB  # maximum read from all files together
MAX_FILE_BYTES = 16 * MIB  # maximum read from one file, since many files are more representative than one
MAX_READ_S = 3.0
MAX_WALK_S = 2.0
MAX_FILES = 100_000  # maximum number of files listed; only a few thousand of them are read
OWN_BYTES = 64 * MIB  # size of the file that is written if existing files cannot be read past the page cache
SPARE_BYTES = 1 << 30  # space that must stay free on the disk when that file is written

DIRECT = "existing files, past the page cache (O_DIRECT), one reader"
OWN_FILE = "a file of 64 MiB written for this check, dropped from the page cache (POSIX_FADV_DONTNEED) and read, one reader"
CACHED = "existing files through the page cache: files read before may have come from memory; one reader"


class _NotDirect(Exception):
    """This file system does not allow reading past the page cache."""


def look(folder: str) -> dict[str, Any]:
    """Returns what was measured in a folder.

    Returns:
        "path"; "problem": why nothing could be measured, or "";
        without a problem also "file_system", "num_files" and "bytes" (of the files listed), "is_all" (whether all files were
        listed), "num_read", "read_bytes" and "seconds" (of the measurement), "method" (DIRECT, OWN_FILE, CACHED, or "" without
        files).
    """
    path = os.path.abspath(os.path.expanduser(folder))
    if reason := problem(path):
        return {"path": path, "problem": reason}
    files, num_bytes, is_all = _files(path)
    found = {"path": path, "problem": "", "file_system": file_system(path), "num_files": len(files), "bytes": num_bytes}
    random.Random(0).shuffle(files)  # like a shuffling loader, not in the order in which the files were written
    return {**found, "is_all": is_all, **_measure(path, files)}


def problem(folder: str) -> str:
    """Returns why a folder cannot be read, in a few words; "" if it can. Hangs if the file system hangs."""
    path = os.path.expanduser(folder)
    if not os.path.isdir(path):
        return "a file, not a folder" if os.path.exists(path) else "no such folder"
    return "" if os.access(path, os.R_OK | os.X_OK) else "a folder that cannot be read"


def file_system(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Returns the type of the file system that holds a path, such as "ext4"; "" if unknown."""
    best, kind = "", ""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return ""
    for _, point, type_, *_ in (line for line in lines if len(line) >= 3):
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and os.path.commonpath([point, os.path.realpath(path)]) == point:
            best, kind = point, type_
    return kind


def _files(path: str) -> tuple[list[str], int, bool]:
    """Returns the non-empty regular files below a folder, their total bytes, and whether the list is complete."""
    give_up_s = time.monotonic() + MAX_WALK_S
    files: list[str] = []
    num_bytes = 0
    for entry in _walk(path):
        if len(files) >= MAX_FILES or time.monotonic() >= give_up_s:
            return files, num_bytes, False
        try:
            size = entry.stat().st_size
        except OSError:
            continue
        if size:
            files.append(entry.path)
            num_bytes += size
    return files, num_bytes, True


def _walk(path: str) -> Iterator[os.DirEntry[str]]:
    """Yields the files below a folder, following links; visits each folder once, since links may lead back."""
    folders = [path]
    seen: set[tuple[int, int]] = set()
    while folders:
        folder = folders.pop()
        try:
            place = os.stat(folder)
            if (place.st_dev, place.st_ino) in seen:
                continue
            seen.add((place.st_dev, place.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        is_folder, is_file = entry.is_dir(), entry.is_file()
                    except OSError:  # for example, a link that leads to itself
                        continue
                    if is_folder:
                        folders.append(entry.path)
                    elif is_file:
                        yield entry
        except OSError:
            continue


def _measure(path: str, files: list[str]) -> dict[str, Any]:
    if not files:
        return {"num_read": 0, "read_bytes": 0, "seconds": 0.0, "method": ""}
    try:
        return {**_read(files, os.O_DIRECT), "method": DIRECT}
    except _NotDirect:
        pass
    try:
        return {**_own_file(path), "method": OWN_FILE}
    except OSError:  # the disk is read-only or full
        return {**_read(files, 0), "method": CACHED}


def _read(files: list[str], flag: int) -> dict[str, Any]:
    """Reads files up to MAX_BYTES or MAX_READ_S; returns {"num_read", "read_bytes", "seconds"}."""
    read_bytes = num_read = 0
    begun_s = time.monotonic()
    with mmap.mmap(-1, MIB) as buffer:  # page-aligned memory, as O_DIRECT requires
        for file in files:
            if read_bytes >= MAX_BYTES or time.monotonic() - begun_s >= MAX_READ_S:
                break
            try:
                read_bytes += _read_file(file, flag, buffer)
                num_read += 1
            except OSError as error:
                if flag and error.errno in (errno.EINVAL, errno.ENOTSUP):
                    raise _NotDirect from error
    return {"num_read": num_read, "read_bytes": read_bytes, "seconds": time.monotonic() - begun_s}


def _read_file(file: str, flag: int, buffer: mmap.mmap) -> int:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | flag)
    try:
        total = 0
        while total < MAX_FILE_BYTES:
            got = os.readv(descriptor, [buffer])
            total += got
            # A short read means the end of the file. Reading again to confirm this would fail with O_DIRECT, because the offset
            # is no longer aligned.
            if got < len(buffer):
                break
        return total
    finally:
        os.close(descriptor)


def _own_file(path: str) -> dict[str, Any]:
    if shutil.disk_usage(path).free < SPARE_BYTES + OWN_BYTES:
        raise OSError(errno.ENOSPC, "no room")
    with tempfile.NamedTemporaryFile(dir=path, prefix=".autotune-doctor-") as file:
        for _ in range(OWN_BYTES // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun_s = time.monotonic()
        while file.read(MIB) and time.monotonic() - begun_s < MAX_READ_S:
            continue
        return {"num_read": 1, "read_bytes": file.tell(), "seconds": time.monotonic() - begun_s}
