"""Removes shared-memory segments that a trial's processes left behind when they were killed.

The supervisor removes them or, if it was killed, the tuner. If both were killed, the resumed study does: it reads the trial's
processes from a list that the tuner kept in the trial's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.harness.cores import read
from autotune.launchers import process_tree

FOLDER = Path("/dev/shm")  # where Linux shows POSIX shared memory as files
# "torch_<pid>_<random>_<counter>" by torch (c10::NewProcessWideShmHandle), "pym-<pid>-..." by multiprocessing (heap.Arena).
NAME = re.compile(r"(?:torch_(\d+)_\d+(?:_\d+)?|pym-(\d+)-\w+)")
LIST_FILE = "processes.jsonl"  # in a trial's folder, while the trial runs
BOOT_ID = "/proc/sys/kernel/random/boot_id"
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


def note(place: Path, processes: Sequence[Sequence[float]]) -> None:
    """Adds new processes of a trial, each as (id, created), to the list in the trial's folder."""
    with contextlib.suppress(OSError), (place / LIST_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"host": platform.node(), "boot_id": read(BOOT_ID), "processes": processes}) + "\n")


def forget(place: Path) -> None:
    """Removes the list from a trial's folder, once nothing is left of the trial."""
    with contextlib.suppress(OSError):
        (place / LIST_FILE).unlink(missing_ok=True)


def remove_left(study: Path) -> None:
    """Removes the segments of trials whose supervisor and tuner were killed. Keeps the lists of another host for that host."""
    host, boot_id = platform.node(), read(BOOT_ID)
    for file in study.glob(f"trials/*/{LIST_FILE}"):
        processes: dict[int, float] = {}
        is_of_another = False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a line written only in part
            for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                if line["boot_id"] == boot_id:  # a container that is started again has another name, but the same memory
                    processes |= {int(pid): float(created_s) for pid, created_s in line["processes"]}
                elif line.get("host", host) != host:
                    is_of_another = True
        remove(processes)
        if not is_of_another:
            forget(file.parent)
