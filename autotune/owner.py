"""Ensures that one process at a time works on a study, by a lock that the kernel releases no matter how that process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.documents import read_json
from autotune.plain_text import escaped
from autotune.shapes import moment, text, whole_number

OWNER_FILE = "owner.json"
MAX_HOST = 253  # characters; the longest name that a host can have
SHAPE = {"host": text, "pid": whole_number, "started_at": moment}
TRIES, PAUSE_S = 10, 0.1  # number of tries to lock, and pause between them: `owner_of` may hold the lock for a moment


class Owned(Exception):
    """Another process is working on the study. Carries what is known of that process: {"host", "pid", "started_at"} or less."""

    def __init__(self, owner: dict[str, Any]) -> None:
        super().__init__()
        self.owner = owner

    def __str__(self) -> str:
        return describe(self.owner)


class Claim:
    """The right to write a study's folder, held until the context is left or the process ends.

    The lock is on the owner's file, which holds the owner's host, pid and start time. Child processes do not inherit the lock.

    Attributes:
        problem: why the folder could not be locked; "" if it was locked. Without a lock, a second tuner may start.
    """

    def __init__(self, folder: Path) -> None:
        self.problem = ""
        self._file = folder / OWNER_FILE
        self._descriptor: int | None = None

    def __enter__(self) -> Claim:
        """Takes the lock.

        Raises:
            Owned: another process has it.
            OSError: the folder cannot be written.
        """
        import psutil  # imported here and below, since commands that only read studies do not need it

        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._lock(descriptor)
            me = {"host": platform.node(), "pid": os.getpid(), "started_at": psutil.Process().create_time()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(me).encode(), 0)
            os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._descriptor is not None:
            if self.problem:  # without locks, only the emptied file shows other hosts that the study has no owner
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_lost(self) -> bool:
        """Whether the claimed folder is gone: deleted, moved or replaced."""
        assert self._descriptor is not None
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self._file))
        except OSError:
            return True

    def _lock(self, descriptor: int) -> None:
        for attempt in range(TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt == TRIES - 1:
                    raise Owned(_read(self._file)) from None
                time.sleep(PAUSE_S)
            except OSError as error:  # a network file system without locks
                owner = _read(self._file)
                if _is_alive(owner):
                    raise Owned(owner) from None
                self.problem = error.strerror or str(error)
                return


def owner_of(folder: Path) -> dict[str, Any] | None:
    """Returns a study's current owner, {"host", "pid", "started_at"} or as much as is known; None if the study has none."""
    try:
        descriptor = os.open(folder / OWNER_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(folder / OWNER_FILE)
    except OSError:  # no locks on this file system: trust the file, as far as it can be checked
        owner = _read(folder / OWNER_FILE)
        return owner if _is_alive(owner) else None
    else:
        return None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Locks a file or a folder. Yields False if another process holds the lock, else True, even if there is no such file.

    Writes nothing, so it also works on a full disk.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | flags)  # on NFS, an exclusive lock needs O_RDWR
        except OSError:  # a folder, or a file that this user may only read
            descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it also fails while another process has an exclusive lock
        is_free = True
    except OSError as error:
        is_free = not isinstance(error, BlockingIOError)  # any other error means a file system without locks
    try:
        yield is_free
    finally:
        os.close(descriptor)


def describe(owner: dict[str, Any]) -> str:
    """Returns "process 4242 on host bench, since 2026-11-21 16:20:11" for a message."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["started_at"])) if "started_at" in owner else "?"
    return f"process {owner.get('pid', '?')} on host {escaped(owner.get('host', '?')[:MAX_HOST])}, since {when}"


def _read(file: Path) -> dict[str, Any]:
    """Returns what the file says about the owner, without impossible values, which another user may have written."""
    try:
        raw = read_json(file)
    except (OSError, ValueError):  # being written
        return {}
    raw = raw if isinstance(raw, dict) else {}
    return {name: raw[name] for name, is_right in SHAPE.items() if name in raw and is_right(raw[name])}


def _is_alive(owner: dict[str, Any]) -> bool:
    """Whether the recorded owner is still alive; an owner on another host is assumed to be alive."""
    import psutil

    if owner.get("host") != platform.node():
        return bool(owner)
    try:
        started_at = psutil.Process(int(owner["pid"])).create_time()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
    return abs(started_at - float(owner.get("started_at", 0.0))) < 2.0
