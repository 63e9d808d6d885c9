"""Findings about the data folder: how fast it is read, and whether memory can keep it."""

from __future__ import annotations

import shlex
from typing import Any

from autotune.machine.checks.finding import Finding, Status
from autotune.quantities import bytes_text, number_text

GROUP = "data"
# A hard disk reads so much in sequence, and far fewer files one by one. Where neither is reached, reading is likely to be what
# training waits for; small files alone keep the first number low on any disk.
SLOW_BYTES_PER_S, SLOW_FILES_PER_S = 100e6, 1000
TOO_LITTLE_BYTES = 8 << 20  # less says how long a disk takes to answer, not how fast it is
# File systems whose files are not on a disk: in memory, or made up by the kernel as they are read.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "hugetlbfs", "devpts")
NOT_NAMED = "no folder named: `autotune doctor data.root=DIR` reads some of its files"
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "beegfs", "gpfs")
FUSE = "fuse"


def check_data(found: dict[str, Any], problem: str = "", *, host: dict[str, Any]) -> list[Finding]:
    """Returns the findings about a data folder.

    Args:
        found: the document of the probe; {} when there is none.
        problem: why there is none; "" beside an empty document means that no folder was named.
        host: the document of the host's probe, {} without one.
    """
    problem = problem or str(found.get("problem") or "")  # the folder has gone since it was named
    if problem:
        cost = "a program that reads there hangs as long"
        return [_finding("disk", f"the folder could not be read: {problem}", Status.error, cost, "mount; sudo dmesg | tail")]
    if not found:
        return [_finding("disk", NOT_NAMED, Status.skipped)]
    if not found["num_files"]:
        return [_finding("disk", f"{found['path']} has no files with anything in them", Status.skipped)]
    return [_speed(found), *_page_cache(found, host)]


def _speed(found: dict[str, Any]) -> Finding:
    kind = found["file_system"]
    rate = found["read_bytes"] / max(found["seconds"], 1e-9)
    files = found["num_read"] / max(found["seconds"], 1e-9)
    text = f"{found['path']}{f' ({kind})' if kind else ''}: {bytes_text(rate)}/s, {number_text(files)} files/s"
    text += f"; {bytes_text(found['read_bytes'])} in {_files(found['num_read'])}: {found['method']}"
    if kind in IN_MEMORY:
        return _finding("disk", f"{found['path']} ({kind}): in memory, not a disk; read at {bytes_text(rate)}/s")
    if found["read_bytes"] < TOO_LITTLE_BYTES and files < SLOW_FILES_PER_S:
        read = f"{bytes_text(found['read_bytes'])} in {_files(found['num_read'])}"
        return _finding("disk", f"{found['path']}{f' ({kind})' if kind else ''}: too little to judge it by, {read}")
    if rate >= SLOW_BYTES_PER_S or files >= SLOW_FILES_PER_S:
        return _finding("disk", text)
    cost = "one loader worker cannot have more than that; several read side by side"
    is_remote = kind in REMOTE or kind.startswith(FUSE)
    why = "it lies on another machine" if is_remote else "if there is a faster one"
    command = f"cp -r {shlex.quote(found['path'])} /local/disk   # {why}"
    return _finding("disk", text, Status.warning, cost, command)


def _page_cache(found: dict[str, Any], host: dict[str, Any]) -> list[Finding]:
    """Says whether a second epoch can come from memory, which is what the speed of the disk is worth."""
    free = host.get("available_bytes")
    if not free:
        return []
    at_least = "" if found["is_all"] else "at least "
    text = (
        f"{at_least}{bytes_text(found['bytes'])} in {at_least}{_files(found['num_files'])}, {bytes_text(free)} of memory free"
    )
    if found["bytes"] < free:
        return [
            _finding("page cache", f"{text}: {'later epochs can come from memory' if found['is_all'] else 'may fit or not'}")
        ]
    return [_finding("page cache", f"{text}: every epoch reads the disk again, at the rate above")]


def _files(number: int) -> str:
    return f"{number:,} file{'' if number == 1 else 's'}"


def _finding(name: str, found: str, status: Status = Status.ok, cost: str = "", command: str = "") -> Finding:
    return Finding(group=GROUP, name=name, status=status, found=found, cost=cost, command=command)
