import atexit
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.launchers.environment import own_environment
from tests.harness.forks import Forks, OwnForks

COMMANDS = ("app", "doctor", "explain", "export", "inspect", "knobs", "prune", "report", "resume", "run", "show", "trial")
MODULES = [
    *("autotune.study", *(f"autotune.cli.{name}" for name in COMMANDS)),
    *(f"autotune.config.{name}" for name in ("compose", "conflicts", "describe", "recipe", "slots")),
]


@functools.cache
def _forks() -> Forks:
    """Returns the process that is forked for every command; it ends with the tests."""
    made = OwnForks(own_environment(), MODULES)
    atexit.register(made.close)
    return made


class Cli:
    """Runs `python -m autotune` in a separate folder, as a user would.

    For speed, a call forks a process that has imported autotune; `start` starts a new interpreter.
    """

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        kept = {k: v for k, v in own_environment().items() if k != "MLFLOW_TRACKING_URI"}
        self.environment = {**kept, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        added = {**dict.fromkeys(os.environ), **self.environment}
        with tempfile.TemporaryDirectory() as folder:
            ended = _forks().run(["-m", "autotune", *words], self.cwd, [added], logs=Path(folder) / "log")
        return subprocess.CompletedProcess(words, *ended)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "autotune", *words],
            cwd=self.cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def refused(self, *words: str) -> str:
        """Runs a command that must be refused (status 2, one message, no traceback), and returns the message."""
        ended = self(*words)
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr
        assert ended.stdout == ""
        assert ended.stderr.startswith("autotune: ")
        return ended.stderr


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def utc() -> Iterator[None]:
    """Sets the time zone of this process to UTC until the end of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="session")
def is_gone():
    """Returns a function that checks that no process of a group is left, and waits up to 10 s for the last one."""

    def check(group: int) -> bool:
        for _ in range(100):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
        return False

    return check
