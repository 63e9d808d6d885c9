"""Names and locks the files that a tuner makes in the runs folder, and finds those that killed tuners have left there."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import platform
import re
from pathlib import Path

from autotune.launchers.process_tree import is_taken
from autotune.launchers.user_files import NOTES


def own_prefix() -> str:
    """Returns how the names of this process's files in the runs folder begin."""
    return f"{_prefix()}{os.getpid()}-"


def left_by_killed(runs_dir: Path, suffix: str) -> list[Path]:
    """Returns this user's files in the runs folder with this suffix, made by processes of this host that no longer run.

    A process may run in another container although its id is free here. So locked files are left out, too.
    """
    # If this host is "NAME", the pattern must not match the files of a host "NAME-2".
    of_host = re.compile(rf"{re.escape(_prefix())}([0-9]+)-(?:autotune-)?\w+{re.escape(suffix)}")
    named = {file: of_host.fullmatch(file.name) for file in runs_dir.glob(f"{glob.escape(_prefix())}*{suffix}")}
    return [file for file, name in named.items() if name and not is_taken(int(name[1])) and is_free(file)]


def lock(descriptor: int) -> None:
    """Locks a file until the descriptor is closed. Until then, `left_by_killed` leaves it out in every container."""
    with contextlib.suppress(OSError):  # no locks on this file system
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_free(file: Path) -> bool:
    """Whether a file is this user's, has no other name (hard link), and is locked by no process."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # on NFS, a lock needs O_RDWR
    except OSError:  # another user's, or gone
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            return False
    finally:
        status = os.fstat(descriptor)
        is_ours = status.st_uid == os.getuid() and status.st_nlink == 1
        os.close(descriptor)
    return is_ours


def _prefix() -> str:
    return f"{NOTES}{platform.node()}-"
