"""Becomes the program of a trial: `python -I -S entry_point.py PARENT_PID COMMAND ...`.

It uses only the standard library, and is run by file path.

It is a separate program instead of a `preexec_fn`, so that no Python code runs between fork and exec. `exec` keeps the process
id and replaces this program by the trial's command.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
MAX_OPEN_FILES = 65_536  # with a soft limit of millions, programs that close every descriptor are slow
NOT_FOUND = 127  # the shell's exit status for a command that cannot be started


def end_with_parent(parent: int) -> None:
    """Asks the kernel to terminate this process when its parent, the supervisor, dies for any reason.

    The signal is SIGTERM, since a torchrun agent ends its workers on SIGTERM. On SIGKILL, it would leave them behind.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call
        sys.exit(1)


def prepare() -> None:
    """Raises the soft limit on open files, and resets signals that Python ignores, because programs would inherit that.

    Workers pass tensors as file descriptors, and the usual 1024 run out. Shells rely on SIGPIPE.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)


def main(parent: int, argv: list[str]) -> None:
    """Replaces this process with `argv`; if that fails, prints why to standard error and exits with status 127."""
    end_with_parent(parent)
    prepare()
    try:
        os.execvp(argv[0], argv)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"autotune: the command cannot be started: {argv[0]!r}: {getattr(error, 'strerror', error)}\n")
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
