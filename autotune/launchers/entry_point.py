"""Sets up this process and replaces itself by COMMAND (exec): `python -I -S entry_point.py PARENT_PID COMMAND ...`.

The supervisor starts trials through this program, and child.py starts `srun` and Ray's broker. A `preexec_fn` of `subprocess`
could set up the process as well, but it would run Python code between fork and exec, which may deadlock if there are threads.

It uses only the standard library, because it is run by file path, with options that hide installed packages.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
MAX_OPEN_FILES = 65_536  # some programs close every possible descriptor, which takes long if the soft limit is millions
NOT_FOUND = 127  # the shell's exit status for a command that cannot be started


def end_with_parent(parent: int) -> None:
    """Asks the kernel to terminate this process when its parent (id `parent`) ends for any reason.

    The signal is SIGTERM, because torchrun ends its workers on SIGTERM. SIGKILL would leave the workers running.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call
        sys.exit(1)


def prepare() -> None:
    """Raises the soft limit on open files, and lets signals that Python ignores act again. The program inherits both.

    Loader workers pass tensors as file descriptors, for which the usual limit of 1024 is too low. Pipes of shells need SIGPIPE.
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
