"""Programs in forks of a process that has imported torch: a trial in a tenth of the time that an interpreter takes to start."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SERVER = Path(__file__).with_name("fork_server.py")


class Ended(NamedTuple):
    """How a program in forks has ended: the exit status of the rank that went worst, and what all have written."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """The process that forks; one program at a time.

    Args:
        environment: of every program, before what is added for it.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        words = [sys.executable, str(SERVER)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(self, argv: list[str], folder: Path, ranks: list[dict[str, str]]) -> Ended:
        """Runs a program in a folder, a process for each environment in `ranks`; its logs lie beside the folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        logs = [folder.with_name(f"{folder.name}.{name}") for name in ("stdout", "stderr")]
        for log in logs:
            log.touch()
        job = {"argv": argv, "folder": str(folder), "env": ranks, "logs": list(map(str, logs))}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        return Ended(max(statuses, key=abs), *(log.read_text() for log in logs))

    def close(self) -> None:
        """Ends the process; nothing is left of it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(timeout=30)


def of_ranks(num: int, added: dict[str, str]) -> list[dict[str, str]]:
    """Returns the environments of the ranks of a job, as torchrun makes them; of one process that of a program alone."""
    if num == 1:
        return [added]
    job = {**added, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num)}
    return [{**job, "LOCAL_WORLD_SIZE": str(num), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
