"""What `autotune doctor` looks at, each in a process of its own: a driver or a file system that hangs takes only that along.

    python -m autotune.machine.probes gpus           the GPUs through NVML, and how they are connected
    python -m autotune.machine.probes host           cores, memory, limits, settings of the kernel, variables
    python -m autotune.machine.probes data FOLDER    how fast a folder's files are read
    PYTHON interpreter.py [--import]                 torch and what it needs, in the program's own interpreter

Each prints one JSON document. They look and change nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from autotune.plain_text import plain

INTERPRETER = Path(__file__).with_name("interpreter.py")
KILLED_S = 1.0  # waited for a process after SIGKILL; one that the kernel holds does not go, and is left behind


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a probe said.

    Attributes:
        facts: its document; {} without one.
        problem: why there is none, in a few words; "" where there is.
        seconds: how long it took, its interpreter's start included.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0


class Probe:
    """A probe that runs; ended with the context.

    Args:
        argv: its command.
        limit_s: from now on; then it is killed.
        env: its environment.
    """

    def __init__(self, argv: Sequence[str], *, limit_s: float, env: Mapping[str, str]) -> None:
        self._limit_s, self._began_s = limit_s, time.monotonic()
        self._files = contextlib.ExitStack()
        # Files, since a pipe would have to be read while the probe runs.
        self._stdout, self._stderr = (self._files.enter_context(_file()) for _ in range(2))
        self._failed = ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=self._stdout, stderr=self._stderr, env=env, start_new_session=True
            )
        except OSError as error:
            self._failed = f"{argv[0]}: {error.strerror}"

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._files.close()

    def answer(self) -> Answer:
        """Waits for the answer, no longer than the limit, and returns it."""
        if self._process is None:
            return Answer(problem=self._failed)
        try:
            code = self._process.wait(max(0.0, self._began_s + self._limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end()
            return Answer(problem=f"no answer within {self._limit_s:g} s", seconds=self._limit_s)
        seconds = time.monotonic() - self._began_s
        said = _last_line(self._stdout)
        try:
            facts = json.loads(said)
        except ValueError:
            facts = None
        if isinstance(facts, dict):
            return Answer(facts=facts, seconds=seconds)
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else _last_line(self._stderr) or f"ended with status {code}"
        return Answer(problem=how, seconds=seconds)

    def _end(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(KILLED_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            return


def ours(name: str, *arguments: str) -> list[str]:
    """Returns the command of a probe of autotune's own."""
    return [sys.executable, "-m", "autotune.machine.probes", name, *arguments]


def interpreters(python: str, *, with_import: bool) -> list[str]:
    """Returns the command of the probe of an interpreter; importing torch takes seconds, and is left out unless asked for."""
    return [python, str(INTERPRETER), *(["--import"] if with_import else [])]


def _file() -> contextlib.AbstractContextManager[IO[bytes]]:
    return tempfile.TemporaryFile()


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = plain(file.read().decode("utf-8", "replace")).strip().splitlines()
    return lines[-1].strip() if lines else ""
