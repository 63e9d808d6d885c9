"""Runs the probes of `autotune doctor`, each in its own process, so that a hanging driver or file system stops only one probe.

    python -m autotune.machine.probes gpus           the GPUs through NVML, and how they are connected
    python -m autotune.machine.probes host           cores, memory, limits, settings of the kernel, variables
    python -m autotune.machine.probes data FOLDER    how fast a folder's files are read
    PYTHON interpreter.py [--import]                 torch and what torch.compile needs, in the program's interpreter

Each prints one JSON document. Probes only read, except that `data` may write a temporary file.
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
from autotune.process_ends import signal_name

INTERPRETER = Path(__file__).with_name("interpreter.py")
KILLED_S = 1.0  # wait after SIGKILL; a process in an uninterruptible system call does not exit, and is left behind


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a probe.

    Attributes:
        facts: the probe's document; {} if there is none.
        problem: why there is no document, in a few words; "" if there is a document.
        seconds: how long the probe took, including the interpreter's start.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0


class Probe:
    """A running probe. Its time limit ends `limit_s` seconds after its start; leaving the context kills it."""

    def __init__(self, argv: Sequence[str], *, limit_s: float, env: Mapping[str, str]) -> None:
        self._limit_s, self._began_s = limit_s, time.monotonic()
        self._files = contextlib.ExitStack()
        # The probe writes to files. A pipe would have to be read while the probe runs.
        self._stdout, self._stderr = (self._files.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # noqa: SIM115
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
        """Returns the answer once the probe has ended. Kills the probe at the time limit."""
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
        how = f"ended by {signal_name(-code)}" if code < 0 else _last_line(self._stderr) or f"ended with status {code}"
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
    """Returns the command of a probe that runs in autotune's own interpreter."""
    return [sys.executable, "-P", "-m", "autotune.machine.probes", name, *arguments]


def interpreters(python: str, *, with_import: bool) -> list[str]:
    """Returns the command that probes an interpreter. Importing torch is optional, since it takes seconds."""
    return [python, str(INTERPRETER), *(["--import"] if with_import else [])]


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    return plain(file.read().decode("utf-8", "replace")).strip().rpartition("\n")[2].strip()
