"""Finds the files that a study's processes write: inotify(7) reports new names at once, and /proc lists open files."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from autotune.harness.cores import read
from autotune.harness.protocol import MARK_VARIABLE

IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE, IN_ISDIR = 0x8, 0x40, 0x80, 0x100, 0x200, 0x40000000
IN_ONLYDIR = 0x01000000
EVENT = struct.Struct("iIII")  # struct inotify_event: watch, mask, cookie, length of the name
READ_BYTES = 1 << 16
MAX_PARENTS = 64  # longest chain of parents that is followed, from a process up to the supervisor
WRITABLE = 0o200  # bit in the mode of the link /proc/PID/fd/N: the file is open for writing


@dataclass(frozen=True)
class Event:
    """One change in a watched folder.

    Attributes:
        path: the entry that was created, written, deleted or renamed.
        mask: IN_CREATE, IN_CLOSE_WRITE, IN_DELETE, IN_MOVED_FROM or IN_MOVED_TO; with IN_ISDIR if the entry is a folder.
        cookie: number that both events of one rename share.
    """

    path: Path
    mask: int
    cookie: int


class FolderWatch:
    """Watches folders with inotify.

    Attributes:
        file: descriptor that is readable when something has changed. If inotify is not available, it is never readable.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self.file: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.file < 0:  # this user has used up fs.inotify.max_user_instances: use a descriptor that is never readable
            self.file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._paths: dict[int, Path] = {}

    def watch(self, folder: Path) -> None:
        """Watches a folder, but not its subfolders; does nothing if the folder cannot be watched."""
        mask = IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_ONLYDIR
        number = self._libc.inotify_add_watch(self.file, os.fsencode(folder), mask)
        if number >= 0:
            self._paths[number] = folder

    def events(self) -> list[Event]:
        """Returns the changes since the last call."""
        found = []
        while data := self._read():
            at = 0
            while at < len(data):
                number, mask, cookie, length = EVENT.unpack_from(data, at)
                name = data[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0")
                at += EVENT.size + length
                if number in self._paths and name:
                    found.append(Event(self._paths[number] / os.fsdecode(name), mask, cookie))
        return found

    def close(self) -> None:
        """Ends all watches."""
        os.close(self.file)

    def _read(self) -> bytes:
        try:
            return os.read(self.file, READ_BYTES)
        except BlockingIOError:
            return b""


@dataclass
class Processes:
    """The processes of a study: those with a mark of the study in their environment, and their descendants.

    Attributes:
        prefix: the common beginning of the study's marks.
    """

    prefix: str
    _known: dict[int, bool] = field(default_factory=dict)

    def has(self, pid: int) -> bool:
        """Returns whether a process belongs to the study, as /proc shows it now."""
        for _ in range(MAX_PARENTS):
            if self._is_marked(pid):
                return True
            pid = parent_of(pid)
            if pid <= 1:
                return False
        return False

    def opened(self) -> set[Path]:
        """Returns the files that the study's processes have open for writing."""
        found: set[Path] = set()
        for pid in self._members():
            files = f"/proc/{pid}/fd"
            try:
                for name in os.listdir(files):
                    link = f"{files}/{name}"
                    if os.lstat(link).st_mode & WRITABLE:
                        path = os.readlink(link)
                        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
                            found.add(Path(path))
            except OSError:  # the process has exited
                continue
        return found

    def is_any_left(self) -> bool:
        """Returns whether any process of the study runs besides this one."""
        return bool(self._members())

    def _members(self) -> list[int]:
        present = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        known = self._known
        self._known = {pid: known[pid] if pid in known else self.has(pid) for pid in present if pid != os.getpid()}
        # `has` again, because another process may have got the id.
        return [pid for pid, is_member in self._known.items() if is_member and self.has(pid)]

    def _is_marked(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            return False
        return any(entry.startswith(os.fsencode(f"{MARK_VARIABLE}={self.prefix}")) for entry in environment)


def parent_of(pid: int) -> int:
    """Returns the id of a process's parent; 0 if the process has exited."""
    words = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(words[1]) if words else 0
