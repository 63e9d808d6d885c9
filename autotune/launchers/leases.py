"""Takes read leases (fcntl(2), "Leases"). A process that opens a leased file for writing waits until the lease is released.

Linux only. Only the owner of a file and root may lease it. Most network file systems do not support leases.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

# Sent to the process that has the lease when another process begins to wait. The kernel's default is SIGIO, which ends a
# process that has no handler for it. SIGURG does not.
SIGNAL = signal.SIGURG
LOCKS = Path("/proc/locks")


class Lease:
    """A read lease on one file, until `close`.

    Attributes:
        file: descriptor, open for reading; it refers to the leased file even after another file has replaced it at the path.
        status: the file's `os.stat_result` when the lease was taken.

    Raises:
        BlockingIOError: a process has the file open for writing.
        OSError: the file does not exist, cannot be read, or cannot be leased here.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.status = os.fstat(self.file)
            fcntl.fcntl(self.file, fcntl.F_SETSIG, SIGNAL)
            fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BaseException:
            os.close(self.file)
            raise

    @property
    def is_wanted(self) -> bool:
        """Whether a process waits to open the file for writing, or has opened it because the lease timed out."""
        return fcntl.fcntl(self.file, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def waiting(self) -> set[int]:
        """Returns the ids of the processes that wait to open the file for writing, from /proc/locks.

        If the file has several leases, /proc/locks lists a waiting process below only one of them, which may be another
        process's lease. So this returns the processes below any lease on the file. For example, process 7117 waits here:

            1: LEASE  BREAKING  UNLCK 7076 fe:00:2146541 0 EOF
            1: -> LEASE  BREAKER   WRITE 7117 <none>:0 0 EOF
        """
        found, is_below = set(), False
        for line in LOCKS.read_text().splitlines():
            words = line.split()
            if words[1:2] != ["->"]:
                is_below = words[1:3] == ["LEASE", "BREAKING"] and words[5].endswith(f":{self.status.st_ino}")
            elif is_below and words[2:4] == ["LEASE", "BREAKER"]:
                found.add(int(words[5]))
        return found

    def close(self) -> None:
        """Releases the lease and closes the descriptor."""
        os.close(self.file)
