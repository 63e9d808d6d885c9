"""Connects to an agent (node.py) through a child process: `srun` or Ray's broker. The child's stdin and stdout are the link."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from typing import IO

from autotune.errors import BadInput
from autotune.launchers.environment import PACKAGE
from autotune.launchers.link import Link
from autotune.launchers.supervisor import ENTRY_POINT
from autotune.launchers.transport import Transport, end_process
from autotune.plain_text import plain, shortened

# Shell script that runs on every node of a job. It first checks that the node sees the given paths, and reports a missing path
# with the node's name. Then the script becomes the agent on the job's first node. On the other nodes, it only waits until
# standard input ends: srun passes the link to all tasks as their standard input, so these tasks end when the link closes.
_AGENT = (
    # srun ends all tasks once one has failed, and may lose what that task has just printed. So the task sleeps before it exits.
    'for path do test -e "$path" || { echo "autotune: $(uname -n) does not see $path" >&2; sleep 1; exit 127; }; done; '
    'test "${SLURM_PROCID:-0}" = 0 || exec cat >/dev/null; '
    'PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" exec "$1" -P -m autotune.launchers.node'
)
_UNSEEN = re.compile(r"^autotune: (\S+) does not see (.+)$", re.MULTILINE)
MAX_WORDS_BYTES = 1 << 16  # at most this much of the standard error is read, from its end
EXIT_S = 15.0  # longest wait for the exit of a child whose link has closed


class ChildTransport(Transport):
    """A child process that connects to an agent."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (what the child and the agent print to standard error)
        self._process = subprocess.Popen(
            # entry_point.py has the kernel end the child when the tuner exits, even if the child does not read the link.
            [sys.executable, "-I", "-S", str(ENTRY_POINT), str(os.getpid()), *argv],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,  # only the tuner handles Ctrl-C
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.link = Link(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdout.close()
        self._process.stdin.close()
        self._end = weakref.finalize(self, _end, self._process, self.link, self._log)

    def close(self) -> None:
        """Closes the link, which makes agent and child exit. If that takes too long, ends the child, and with it the agent."""
        self._end()

    def exited(self, patience_s: float) -> int | None:
        """Waits at most `patience_s` for the child; returns its exit status, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        return self._process.poll()

    def unseen(self) -> BadInput | None:
        """Returns the error for the user if a node does not see a path that the agent needs; else None."""
        if (found := _UNSEEN.search(self.text())) is None:
            return None
        ours = {sys.executable: "the interpreter that autotune runs in", str(PACKAGE.parent): "autotune itself"}
        what, do = ours.get(found[2], "this folder"), "Install autotune" if found[2] in ours else "Use a folder"
        return BadInput(
            f"launcher: node {found[1]} does not see {what}, got {found[2]!r}. {do} on a file system that all nodes share."
        )

    def text(self) -> str:
        """Returns the end of what child and agent have printed to standard error."""
        file = self._log.fileno()  # the child writes at this file's offset, which pread does not move
        size = os.fstat(file).st_size
        return plain(os.pread(file, MAX_WORDS_BYTES, max(0, size - MAX_WORDS_BYTES)).decode("utf-8", "replace"))

    def last_words(self) -> str:
        """Returns the last line of `text`."""
        return shortened(self.text().strip().rpartition("\n")[2].strip(), 200)


def agent_command(*seen: str) -> list[str]:
    """Returns a command that checks whether a node sees Python, autotune and the paths `seen`, and then starts the agent."""
    return ["/bin/sh", "-c", _AGENT, "autotune", sys.executable, str(PACKAGE.parent), *seen]


def _end(process: subprocess.Popen[bytes], link: Link, log: IO[bytes]) -> None:
    """Ends the child and its agent. Also called when the tuner exits."""
    end_process(process, link)
    log.close()
