"""Guards one user file that a trial must not overwrite.

When a process of the trial opens the file for writing, our lease makes the process wait (see leases.py). Meanwhile a copy takes
the file's place at the path, in one atomic step. Then the trial writes into the old file, which no longer has a name. So the
path names a complete file at every moment, and nothing has to be restored later.

If another program opens the file for writing, it gets the file itself. The trial's processes that want to open the file are
stopped until the other program has saved. So that program's changes are not lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from autotune.harness.protocol import FICLONE
from autotune.launchers.leases import Lease

# Name of the copy of a file NAME before it takes the file's place: ".NAME.PID.autotune.tmp", with the keeper's process id. The
# name contains "autotune" because a user's program may itself save under ".NAME.PID.tmp".
COPY = re.compile(r"\.(.+)\.([0-9]+)\.autotune\.tmp")
# Before each trial, the folders of guarded files are searched for leftover copies. At most this many names of a folder are
# looked at, because the folder of a data set may have millions.
MAX_LOOKED_AT = 10_000
# Largest file that is copied without FICLONE. The trial waits during the copy. By default, the kernel ends the lease, and so
# the wait, after 45 s (/proc/sys/fs/lease-break-time).
MAX_COPIED_BYTES = 8 << 30
MAX_AGAIN_BYTES = 256 << 20  # a file with `max_openings` is not copied again if its copies would exceed this in total
STOPPED_MAX_S = 20.0  # longest time that a trial's process waits for another program to save
LEFT_MAX_S = 2.0  # longest wait, after SIGSTOP, for a process to leave open(): it does so as soon as it is scheduled
RENAME_EXCHANGE, AT_FDCWD = 2, -100


class Guarded:
    """A guard of one file, until `end`.

    Args:
        is_of_trial: returns whether the process with a given id belongs to a trial.
        aside: folder for a copy of the original, which is made if the trial cannot be prevented from changing the file.
        max_openings: how often the trial may open the file for writing. After that, the trial gets the file itself, and the
            original is copied aside. If other programs open the file more often than this, it is no longer guarded. None for no
            limit.

    Attributes:
        path: the file, resolved.
        is_kept: whether the guard has put a copy at the path, because the trial opened the file for writing.
        why_not: why the file can no longer be guarded; "" while it can.
        open_since_s: monotonic time since which it is unguarded because another program writes or replaces it; else None.
        aside: copy of the original, made if the trial could not be prevented from changing or removing the file; else None.
    """

    def __init__(self, path: Path, *, is_of_trial: Callable[[int], bool], aside: Path, max_openings: int | None = None) -> None:
        self.path, self.is_kept, self.why_not = path, False, ""
        self.aside: Path | None = None
        self.open_since_s: float | None = None
        self._is_of_trial, self._folder = is_of_trial, aside
        self._num_openings, self._num_openings_by_others, self._max_openings = 0, 0, max_openings
        self._lease: Lease | None = None
        self._stopped: set[int] = set()  # a trial's processes that wait until another program has saved
        self.look()

    def look(self) -> None:
        """Handles processes that wait to open the file for writing. Takes a lease if there is none afterwards."""
        if self._lease is not None and self._lease.is_wanted:
            self._answer(self._lease)
            if self.why_not:
                self.let_go()
        if self._lease is not None or self.why_not:
            return
        try:
            self._lease = Lease(self.path)
            self.open_since_s = None
            self.let_go()
        except (BlockingIOError, FileNotFoundError):  # another program is writing or replacing it: the next `look` tries again
            self.open_since_s = self.open_since_s or time.monotonic()
            if time.monotonic() - self.open_since_s > STOPPED_MAX_S:
                self.let_go()
        except OSError as error:
            self.why_not, self.open_since_s = error.strerror or str(error), None
            self.let_go()

    def was_replaced(self) -> bool:
        """Returns whether the path now names another file than the guarded one, or no file."""
        if self._lease is None:
            return False
        with contextlib.suppress(OSError):
            return not os.path.samestat(os.stat(self.path, follow_symlinks=False), self._lease.status)
        return True

    def has_no_name(self) -> bool:
        """Returns whether the guarded file has no name left, because it was removed or replaced."""
        return self._lease is not None and os.fstat(self._lease.file).st_nlink == 0

    def follow(self) -> None:
        """Ends the guard of the old file, and guards the file that another program has put at the path."""
        self.end()
        self.look()

    def copy_aside(self) -> None:
        """Copies the original aside and then sets `aside`. If that fails, the original will be lost, and `why_not` says why."""
        if self._lease is None:
            return
        target: Path | None = None
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            target = _new_file(self._folder / self.path.name)
            copy(self._lease, target)
            self.aside = target
        except OSError as error:
            self.why_not = self.why_not or f"its previous content was lost: {error.strerror or error}"
            with contextlib.suppress(OSError):
                if target is not None:
                    target.unlink()

    def _answer(self, lease: Lease) -> None:
        """Handles the processes that wait for the lease, then releases it. Afterwards, `_lease` is the copy's lease or None."""
        waiting = lease.waiting()
        ours = set(filter(self._is_of_trial, waiting))
        new: Lease | None = None
        try:
            if ours and ours == waiting:
                self._count_opening(lease.status.st_size)
                new = self._put_copy_in_place(lease, ours)
                self.is_kept = True
            else:
                self._stop(ours, lease)
                self._count_openings_by_others(len(waiting - ours))
        except BlockingIOError:  # another program now waits as well
            self._stop(ours, lease)
        except FileNotFoundError:  # the path now names another program's file: `look` guards that one next
            return
        except OSError as error:
            self.why_not = error.strerror or str(error)
            self.copy_aside()
        finally:
            self._lease = new
            lease.close()  # this lets the waiting process continue

    def _count_opening(self, size: int) -> None:
        """Counts an opening by the trial. The file has `size` bytes.

        Raises:
            OSError: it was opened too often. Each opening waits for a copy, so opening a log at each step would slow the trial.
        """
        self._num_openings += 1
        if self._max_openings is None:
            return
        if self._num_openings > self._max_openings:
            raise OSError(errno.EBUSY, f"the trial opens it more than {self._max_openings} times")
        if self._num_openings > 1 and self._num_openings * size > MAX_AGAIN_BYTES:
            raise OSError(errno.EBUSY, "it is large, and the trial opens it again and again")

    def _count_openings_by_others(self, num: int) -> None:
        """Counts openings by other programs. After too many, sets `why_not`, because each opening makes the program wait."""
        self._num_openings_by_others += num
        if self._max_openings is not None and self._num_openings_by_others > self._max_openings:
            self.why_not = f"another program opens it more than {self._max_openings} times"

    def _stop(self, pids: set[int], lease: Lease) -> None:
        """Stops a trial's processes until another program has saved. When they continue, their call of open() starts over.

        This waits until the processes have left open(), because the caller then ends the lease. A process still inside open()
        would get the file, and have it open while it is stopped.
        """
        self._stopped |= pids
        _send(pids, signal.SIGSTOP)
        until_s = time.monotonic() + LEFT_MAX_S
        while pids & lease.waiting() and time.monotonic() < until_s:
            time.sleep(0.001)

    def let_go(self) -> None:
        """Lets the trial's processes that were stopped continue."""
        _send(self._stopped, signal.SIGCONT)
        self._stopped = set()

    def _put_copy_in_place(self, lease: Lease, expected: set[int]) -> Lease:
        """Puts a copy at the path and returns the lease on the copy.

        Args:
            lease: the lease on the file that the path names now.
            expected: the only processes that may be waiting for that file.

        Raises:
            BlockingIOError: other processes wait, too; the path is unchanged.
            OSError: for example, there is no space, or the folder cannot be written; the path is unchanged.
        """
        if lease.status.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has other names (hard links), which would see what the trial writes")
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.autotune.tmp")
        new: Lease | None = None
        lock = os.open(temporary, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # this file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            copy(lease, temporary)
            new = Lease(temporary)
            if not lease.waiting() <= expected:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            exchange(temporary, self.path)
            if not os.path.samestat(os.stat(temporary, follow_symlinks=False), lease.status):
                exchange(temporary, self.path)  # another program replaced it meanwhile: put its file back
                raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", str(self.path))
            return new
        except BaseException:
            if new is not None:
                new.close()
            raise
        finally:
            temporary.unlink(missing_ok=True)
            os.close(lock)

    def end_aside(self) -> None:
        """Copies the original aside and ends the guard; may be called in another thread."""
        self.copy_aside()
        self.end()

    def end(self) -> None:
        """Ends the guard: lets stopped processes continue, and releases the lease."""
        self.let_go()
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def copy(lease: Lease, target: Path) -> None:
    """Copies a leased file and, as far as the file system allows, its times, permissions, owner and extended attributes.

    Raises:
        OSError: no space for the copy, file too large to be copied while a trial waits, or file changed during the copy.
    """
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        try:
            fcntl.ioctl(file.fileno(), FICLONE, lease.file)
        except OSError:
            if lease.status.st_size > min(MAX_COPIED_BYTES, shutil.disk_usage(target.parent).free / 2):
                raise OSError(errno.ENOSPC, "it is too large to be copied") from None
            with open(os.dup(lease.file), "rb") as source:
                source.seek(0)
                shutil.copyfileobj(source, file, 1 << 20)
            now = os.fstat(lease.file)
            if (now.st_size, now.st_mtime_ns) != (lease.status.st_size, lease.status.st_mtime_ns):
                raise OSError(errno.ETIMEDOUT, "it was changed while it was being copied") from None
        status = lease.status
        names: list[str] = []
        with contextlib.suppress(OSError):  # a FUSE file system may lack any of the following calls
            names = os.listxattr(lease.file)
        for name in names:
            with contextlib.suppress(OSError):
                os.setxattr(file.fileno(), name, os.getxattr(lease.file, name))
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
        with contextlib.suppress(OSError):
            os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove_left(files: Iterable[Path]) -> None:
    """Removes copies of these files that killed keepers left next to them; their names match COPY.

    A copy stays if its keeper may still run: if the process id in the copy's name is in use, or the copy is locked.
    """
    names: dict[Path, set[str]] = {}
    for file in files:
        names.setdefault(file.parent, set()).add(file.name)
    for folder, guarded in names.items():
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in itertools.islice(entries, MAX_LOOKED_AT):
                found = COPY.fullmatch(entry.name)
                if found and found[1] in guarded and not os.path.exists(f"/proc/{found[2]}"):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    with contextlib.suppress(OSError):  # the copy is locked, for example by a keeper in another container
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(file)


def _new_file(path: Path) -> Path:
    """Makes an empty file and returns its path: `path` or, if that exists, a path with a number before the name ("2-NAME")."""
    number, new = 1, path
    while True:
        try:
            new.touch(0o600, exist_ok=False)  # fails if the name exists, even if another thread has made it just now
            return new
        except FileExistsError:
            number += 1
            new = path.with_name(f"{number}-{path.name}")


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def exchange(one: Path, other: Path) -> None:
    """Atomically swaps the names of two files; raises OSError."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))
