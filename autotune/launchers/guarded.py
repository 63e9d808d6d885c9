"""One file of the user's that a trial must not write over.

When a process of the trial opens the file for writing, it waits for our lease (see leases.py). A copy is then put in the
file's place, in one step, and the trial goes on to write into the old file, which has no name any more. So the path names a
whole file at every moment, nothing has to be put back later, and what other programs write stays as they wrote it: they are
let through at once, and before a process of a trial that waits with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

from autotune.launchers.leases import Lease

FICLONE = 0x40049409  # ioctl: the copy shares the blocks of the original until one is written (btrfs, XFS)
MAX_COPIED_BYTES = 8 << 30  # copied while the trial waits: the kernel lets it wait for 45 s (/proc/sys/fs/lease-break-time)
STOPPED_MAX_S = 20.0  # a process of a trial waits for another program's save no longer
LEFT_MAX_S = 2.0  # until a stopped process has left its opening: as soon as it is scheduled
RENAME_EXCHANGE, AT_FDCWD = 2, -100


class Guarded:
    """A file under guard, until `end`.

    Attributes:
        path: the file, resolved.
        is_kept: the trial opened it for writing and was given the old file.
        why_not: why it cannot be guarded any more; "" while it is.
        open_since_s: since when it is not guarded because another program writes it, monotonic; None otherwise.
        aside: copy of the file as it was before the trial wrote over it, where it could not be kept from that; else None.
    """

    def __init__(self, path: Path, *, is_of_trial: Callable[[int], bool], aside: Path) -> None:
        self.path, self.is_kept, self.why_not = path, False, ""
        self.aside: Path | None = None
        self.open_since_s: float | None = None
        self._is_of_trial, self._target = is_of_trial, aside / path.name
        self._lease: Lease | None = None
        self._stopped: set[int] = set()  # processes of a trial that wait until another program has saved
        self.look()

    @property
    def is_leased(self) -> bool:
        """Whether a trial that opens it has to wait."""
        return self._lease is not None

    def look(self) -> None:
        """Answers a process that waits to write, and takes the lease where there is none."""
        if self._lease is not None and self._lease.is_wanted:
            self._answer(self._lease)
        if self._lease is not None or self.why_not:
            return
        try:
            self._lease = Lease(self.path)
            self.open_since_s = None
            self._go_on()
        except (BlockingIOError, FileNotFoundError):  # others write it, or are replacing it: later
            self.open_since_s = self.open_since_s or time.monotonic()
            if time.monotonic() - self.open_since_s > STOPPED_MAX_S:
                self._go_on()
        except OSError as error:
            self.why_not, self.open_since_s = error.strerror or str(error), None
            self._go_on()

    def was_replaced(self) -> bool:
        """Returns whether another file, or none, has the path now."""
        if self._lease is None:
            return False
        with contextlib.suppress(OSError):
            return not os.path.samestat(os.stat(self.path, follow_symlinks=False), self._lease.status)
        return True

    def follow(self) -> None:
        """Guards the file that another program has put in its place."""
        self.end()
        self.look()

    def copy_aside(self) -> None:
        """Copies what the file was, as far as there is room; `aside` tells."""
        if self._lease is not None:
            with contextlib.suppress(OSError):
                self._target.parent.mkdir(mode=0o700, exist_ok=True)
                copy(self._lease, self._target)
                self.aside = self._target

    def _answer(self, lease: Lease) -> None:
        waiting = lease.waiting()
        ours = set(filter(self._is_of_trial, waiting))
        new: Lease | None = None
        try:
            if ours and ours == waiting:
                new = self._put_copy_in_place(lease, ours)
                self.is_kept = True
            else:
                self._stop(ours, lease)
        except BlockingIOError:  # another program waits, too, meanwhile
            self._stop(ours, lease)
        except FileNotFoundError:  # the path is another program's file now, which is guarded next
            return
        except OSError as error:
            self.why_not = error.strerror or str(error)
            self.copy_aside()
        finally:
            self._lease = new
            lease.close()  # only now the process goes on

    def _stop(self, pids: set[int], lease: Lease) -> None:
        """Stops processes of a trial until another program, which is let through, has saved: then their opening begins anew.

        The lease must not end before they have left their opening: one that is still in it then opens the file after all, and
        holds it open while it is stopped.
        """
        self._stopped |= pids
        _send(pids, signal.SIGSTOP)
        until_s = time.monotonic() + LEFT_MAX_S
        while pids & lease.waiting() and time.monotonic() < until_s:
            time.sleep(0.001)

    def _go_on(self) -> None:
        _send(self._stopped, signal.SIGCONT)
        self._stopped = set()

    def _put_copy_in_place(self, lease: Lease, expected: set[int]) -> Lease:
        """Gives the path to a copy and returns the lease on it.

        Args:
            lease: on the file that has the path.
            expected: the processes that may wait for it.

        Raises:
            BlockingIOError: others wait, too; the path is as it was.
            OSError: there is no room, or the folder cannot be written; the path is as it was.
        """
        if lease.status.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has other names (hard links), which would see what the trial writes")
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        new: Lease | None = None
        try:
            copy(lease, temporary)
            new = Lease(temporary)
            if not lease.waiting() <= expected:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            exchange(temporary, self.path)
            if not os.path.samestat(os.stat(temporary, follow_symlinks=False), lease.status):
                exchange(temporary, self.path)  # another program has replaced it meanwhile: its file goes back
                raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", str(self.path))
            return new
        except BaseException:
            if new is not None:
                new.close()
            raise
        finally:
            temporary.unlink(missing_ok=True)

    def end(self) -> None:
        """Ends the guard; `follow` begins it anew."""
        self._go_on()
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def copy(lease: Lease, target: Path) -> None:
    """Copies a leased file with its times, permissions and owner.

    Raises:
        OSError: there is no room for it, or it is too large to be copied while a trial waits.
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
                raise OSError(errno.ETIMEDOUT, "it was written before it was copied") from None
        status = lease.status
        for name in os.listxattr(lease.file):
            with contextlib.suppress(OSError):
                os.setxattr(file.fileno(), name, os.getxattr(lease.file, name))
        with contextlib.suppress(PermissionError):
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def exchange(one: Path, other: Path) -> None:
    """Has two files change names, in one step; raises OSError."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))
