"""Runs programs in forks of a process that has imported torch or autotune: ten times faster than in new interpreters."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.ports import free_port

SERVER = Path(__file__).with_name("fork_server.py")
TORCH = ("torch", "torch._dynamo")  # the first optimizer would import torch._dynamo


class Ended(NamedTuple):
    """How a program in forks has ended: the worst exit status of its ranks, and the output of all ranks."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """The process that forks. It runs one program at a time.

    Args:
        environment: the environment variables of every program; `run` adds more.
        modules: modules that are imported before the first fork.
    """

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = TORCH) -> None:
        words = [sys.executable, str(SERVER), *modules]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(
        self, argv: Sequence[str], folder: Path, ranks: Sequence[Mapping[str, str | None]], logs: Path | None = None
    ) -> Ended:
        """Runs a program in a folder, one process for each environment in `ranks`.

        Args:
            argv: a script, or -m and a module; then the program's arguments.
            folder: the program's working directory.
            ranks: for each rank, variables that are added to the environment; a variable that is None is removed.
            logs: path of the logs without the ending .stdout or .stderr; None for the folder's path.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        written = [(logs or folder).with_name(f"{(logs or folder).name}.{name}") for name in ("stdout", "stderr")]
        for log in written:
            log.touch()
        job = {"argv": argv, "folder": str(folder), "env": ranks, "logs": list(map(str, written))}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        return Ended(max(statuses, key=abs), *(log.read_text() for log in written))

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(timeout=30)


def of_ranks(num: int, added: dict[str, str]) -> list[dict[str, str]]:
    """Returns the environments of a job's ranks, as torchrun sets them. A single process gets no torchrun variables."""
    if num == 1:
        return [added]
    job = {**added, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num)}
    return [{**job, "LOCAL_WORLD_SIZE": str(num), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]
