"""Removes shared-memory segments that a trial's processes left behind when they were killed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from autotune.launchers import process_tree

FOLDER = Path("/dev/shm")  # where Linux shows POSIX shared memory as files
# "torch_<pid>_<random>_<counter>" by torch (c10::NewProcessWideShmHandle), "pym-<pid>-..." by multiprocessing (heap.Arena).
NAME = re.compile(r"(?:torch_(\d+)_\d+(?:_\d+)?|pym-(\d+)-\w+)")
SLACK_S = 1.0  # process start times have a resolution of 10 ms, and the kernel's file clock is no finer


def remove(processes: Mapping[int, float], folder: Path = FOLDER) -> list[str]:
    """Removes the segments that these processes made and returns their names; skips processes that still run.

    A segment is removed if its name contains the id of one of these processes, the process has exited, and the segment was
    made after the process started. Other names do not contain the id (`psm_...` of multiprocessing.shared_memory). The
    library's own resource tracker removes such segments, and may run long enough to do so.

    Args:
        processes: process id -> when it was created, seconds since the epoch.
        folder: where segments are files.
    """
    removed = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = NAME.fullmatch(entry.name)
            pid = int(match[1] or match[2]) if match else 0
            if pid not in processes or process_tree.is_taken(pid):
                continue
            with contextlib.suppress(OSError):  # another process removed it first, or owns it
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and status.st_ctime >= processes[pid] - SLACK_S:
                    os.unlink(entry.path)
                    removed.append(entry.name)
    return removed
