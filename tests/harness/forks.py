"""Runs programs in forks of a process that has imported torch or autotune: ten times faster than in new interpreters."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from tests.support.ports import free_port

SERVER = Path(__file__).with_name("fork_server.py")
TORCH = ("torch", "torch._dynamo")  # the first optimizer would import torch._dynamo


class Ended(NamedTuple):
    """How a program in forks has ended: the worst exit status of its ranks, and the output of all ranks."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """A process that forks. It runs one program at a time.

    Args:
        asks, answers: the standard input and output of `fork_server.py`.
    """

    def __init__(self, asks: IO[str], answers: IO[str]) -> None:
        self._asks, self._answers = asks, answers

    def ask(self, job: Mapping[str, object]) -> None:
        """Sends a line to the process."""
        self._asks.write(json.dumps(job) + "\n")
        self._asks.flush()

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
        written = [(logs or folder).with_name(f"{(logs or folder).name}.{name}") for name in ("stdout", "stderr")]
        for log in written:
            log.touch()
        self.ask({"argv": argv, "folder": str(folder), "env": ranks, "logs": list(map(str, written))})
        statuses = json.loads(self._answers.readline())
        return Ended(max(statuses, key=abs), *(log.read_text() for log in written))

    def close(self) -> None:
        """Ends the process."""
        self._asks.close()
        self._answers.close()


class OwnForks(Forks):
    """A process that forks, started for one user.

    Args:
        environment: the environment variables of every program; `run` adds more.
        modules: modules that are imported before the first fork.
    """

    def __init__(self, environment: dict[str, str], modules: Sequence[str]) -> None:
        words = [sys.executable, str(SERVER), *modules]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(self._process.stdin, self._process.stdout)

    def close(self) -> None:
        """Ends the process and waits for its end."""
        super().close()
        self._process.wait(timeout=30)


class Server:
    """The process that has imported torch, of which each `Forks` made here is a fork. All workers of pytest-xdist share it.

    Args:
        folder: a folder that all workers share.
        environment: the environment variables of every program; `Forks.run` adds more.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._started: list[tuple[subprocess.Popen[bytes], str]] = []

    @contextlib.contextmanager
    def forks(self, *modules: str) -> Iterator[Forks]:
        """Yields a process that forks, and ends it. It has imported torch and further modules."""
        with self._connected() as connection, connection.makefile("w") as asks, connection.makefile("r") as answers:
            made = Forks(asks, answers)
            if modules:
                made.ask({"modules": modules})
            yield made

    def _connected(self) -> socket.socket:
        """Returns a connection to the process. The first worker that needs the process starts it, and later ends it."""
        with open(self._folder / "forks.lock", "w") as lock, contextlib.ExitStack() as failed:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = failed.enter_context(socket.socket(socket.AF_UNIX))
            try:
                connection.connect((self._folder / "forks.socket").read_text())
            except OSError:  # it has not started yet, or has left with the worker that started it
                connection.connect(self._start())
            failed.pop_all()
            return connection

    def _start(self) -> str:
        place = tempfile.mkdtemp(prefix="forks-")  # not in `folder`: a socket's path has at most 107 characters
        path = os.path.join(place, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, str(SERVER), f"--listen={listener.fileno()}", *TORCH],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env=self._environment,
            )
        self._started.append((process, place))
        (self._folder / "forks.socket").write_text(path)
        return path

    def close(self) -> None:
        """Ends the process, if it was started here."""
        for process, place in self._started:
            with open(self._folder / "forks.lock", "w") as lock:  # from now on, no worker connects
                fcntl.flock(lock, fcntl.LOCK_EX)
                socket_file = self._folder / "forks.socket"
                if socket_file.exists() and socket_file.read_text() == os.path.join(place, "socket"):
                    socket_file.unlink()
            process.communicate(timeout=60)
            shutil.rmtree(place)


def of_ranks(num: int, added: dict[str, str]) -> list[dict[str, str]]:
    """Returns the environments of a job's ranks, as torchrun sets them. A single process gets no torchrun variables."""
    if num == 1:
        return [added]
    job = {**added, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num)}
    return [{**job, "LOCAL_WORLD_SIZE": str(num), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]
