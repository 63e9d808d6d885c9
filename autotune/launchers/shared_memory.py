"""Removes shared-memory segments that a trial's processes left behind when they were killed.

The supervisor, which is the parent of all trials, removes them. If it was killed, the process that started it removes them: the
tuner or, on a node of a cluster, the agent (node.py). If that process was killed, too, `remove_left` removes them when the
study is started again. `remove_left` reads the ids of each trial's processes from a list in the trial's folder.

The name of a segment contains a process id, which is valid in one PID namespace only. Containers have their own PID namespaces,
but may share /dev/shm (`docker run --ipc=host`). So a segment stays if a process of another namespace may have made it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.documents import write_text
from autotune.harness.cores import read
from autotune.harness.protocol import BOOT_ID
from autotune.launchers import process_tree
from autotune.launchers.leases import Lease

FOLDER = Path("/dev/shm")  # where Linux shows POSIX shared memory as files
# "torch_<pid>_<random>_<counter>" by torch (c10::NewProcessWideShmHandle), "pym-<pid>-..." by multiprocessing (heap.Arena).
NAME = re.compile(r"(?:torch_(\d+)_\d+(?:_\d+)?|pym-(\d+)-\w+)")
LIST_FILE = "processes.jsonl"  # in a trial's folder, while the trial runs
SLACK_S = 1.0  # tolerance: times of processes and files are rounded, so a segment may seem older than its process
FIRST = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}  # inodes of the namespaces outside of all containers (Linux, proc_ns.h)
INNER_IDS = re.compile(r"^NSpid:\t\d+\t(.+)$", re.MULTILINE)  # in /proc/PID/status: ids in the PID namespaces inside this one


def remove(processes: Mapping[int, float], folder: Path = FOLDER) -> list[str]:
    """Removes the segments that these processes made and returns their names; skips processes that still run.

    A segment is removed if its name contains the id of one of these processes, no process with that id runs here or in a
    container, no process has the segment open for writing, and the segment was made after the process started. Segments of
    multiprocessing.shared_memory (`psm_...`) stay, because their names contain no id. The resource tracker of
    multiprocessing removes them. It ignores SIGTERM, so it can outlive the processes that made them.

    Args:
        processes: process id -> when the process was created, seconds since the epoch.
        folder: the folder in which segments are files.
    """
    removed, found = [], [] if _shares_memory_with_host() else _segments(processes, folder)
    elsewhere = _ids_elsewhere() if found else frozenset()
    for pid, entry in found:
        if pid in elsewhere or process_tree.is_taken(pid):
            continue
        with contextlib.suppress(OSError):  # another process has removed the segment, or has it open for writing
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == os.getuid() and status.st_ctime >= processes[pid] - SLACK_S:
                Lease(Path(entry.path)).close()  # fails while any process in any container has it open for writing
                os.unlink(entry.path)
                removed.append(entry.name)
    return removed


def note(place: Path, processes: Sequence[Sequence[float]]) -> None:
    """Adds new processes of a trial, each as (id, seconds since the epoch when created), to the list in its folder `place`."""
    with contextlib.suppress(OSError), (place / LIST_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**_here(), "processes": processes}) + "\n")


def forget(place: Path) -> None:
    """Removes exited processes from the list in a trial's folder: all of this PID namespace, and those from before a reboot.

    Lines of other hosts and PID namespaces stay: they are needed to remove what is left there. The file is replaced atomically,
    so that these lines are not lost if this process is killed meanwhile.
    """
    file, here = place / LIST_FILE, _here()
    lines = _lines(file)
    kept = [line for line in lines if not _is_of(here, line) and not _is_before_reboot(here, line)]
    with contextlib.suppress(OSError):
        if kept and len(kept) < len(lines):  # a line that another host adds meanwhile would be lost, so write only if needed
            write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
        elif not kept:
            file.unlink(missing_ok=True)


def remove_left(study: Path) -> None:
    """Removes the segments of trials that were killed together with their supervisor and tuner; skips trials that still run.

    Keeps the lists of other hosts and other PID namespaces: their process ids mean nothing here.
    """
    here = _here()
    for file in study.glob(f"trials/*/{LIST_FILE}"):
        processes: dict[int, float] = {}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            for line in _lines(file):
                if _is_of(here, line):
                    processes |= {int(pid): float(created_s) for pid, created_s in line["processes"]}
        if not process_tree.still_there(processes):
            remove(processes)
            forget(file.parent)


def namespace(kind: str) -> int:
    """Returns the inode that identifies this process's namespace of a kind ("pid", "ipc"); 0 if unknown."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def _here() -> dict[str, Any]:
    """Returns what identifies this process's PID namespace. The process ids that are visible here are valid only in it."""
    return {"host": platform.node(), "boot_id": read(BOOT_ID), "pid_namespace": namespace("pid")}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a list file."""
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for text in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line written only in part
                found.append(json.loads(text))
    return [line for line in found if isinstance(line, dict)]


def _is_of(here: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Whether the ids in a line are valid here. Ignores the host's name, which changes when a container is started again."""
    return all(line.get(key) == here[key] for key in ("boot_id", "pid_namespace"))


def _is_before_reboot(here: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    return bool(line.get("boot_id") != here["boot_id"] and line.get("host", here["host"]) == here["host"])


def _segments(processes: Mapping[int, float], folder: Path) -> list[tuple[int, os.DirEntry[str]]]:
    """Returns (id, segment) for each segment whose name contains the id of one of these processes."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = NAME.fullmatch(entry.name)
            pid = int(match[1] or match[2]) if match else 0
            if pid in processes:
                found.append((pid, entry))
    return found


def _shares_memory_with_host() -> bool:
    """Whether this container shares memory with its host. Then processes that are not visible here may have made segments."""
    return namespace("pid") != FIRST["pid"] and namespace("ipc") == FIRST["ipc"]


def _ids_elsewhere() -> frozenset[int]:
    """Returns the ids that running processes have in PID namespaces inside this one, such as those of containers."""
    found = [match for file in glob.glob("/proc/[0-9]*/status") if (match := INNER_IDS.search(read(file)))]
    return frozenset(int(word) for match in found for word in match[1].split())
