"""Decides which commands allow warm starts, and manages the warm server: a process that imports torch and forks the trials."""

from __future__ import annotations

import os
import re
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.harness import protocol
from autotune.launchers.base import OF_TORCH, Launch
from autotune.launchers.environment import SERVER, mark_of, server_environment, study_of
from autotune.launchers.injection import with_harness
from autotune.launchers.supervision import SupervisorProcess

SERVER_SCRIPT = Path(protocol.__file__).resolve().parent / "warm_server.py"
PYTHON = re.compile(r"python[\d.]*")
READY_S = 120.0  # longest wait for a server; importing torch from a slow network disk takes a minute
NOT_BY_ENV = "the command begins with env; to let trials start faster, give env.NAME=VALUE before `--` instead"
MAX_SERVERS = 3  # maximum number of servers that a study starts: if three have ended, a fourth would probably end, too


@dataclass(frozen=True, kw_only=True)
class Key:
    """Properties that must be equal for a server and the trials that it forks.

    Attributes:
        interpreter: the Python interpreter as the command names it.
        modules: the modules that the server imports.
        cwd: working directory.
        environment: environment variables, except those that differ between trials.
    """

    interpreter: str
    modules: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]


class WarmServer:
    """The warm server of a study. It is started when it is first needed, and restarted after it has exited.

    Attributes:
        mark: mark of the server that can fork the trial last passed to `prepare`; "" if no server can.
        why_not: why no server can fork that trial; "" if one can.
        why_less: why the server has imported only the modules in OF_TORCH; "" if it has imported all that were requested.
        start_s: how long a fresh interpreter takes to import the modules, measured when the server was last started.
    """

    def __init__(self) -> None:
        self.mark = self.why_not = self.why_less = ""
        self.start_s = 0.0
        self._key: Key | None = None
        self._supervisor: SupervisorProcess | None = None
        self._num_started = 0
        self._unusable = ""

    def prepare(self, launch: Launch, supervisor: SupervisorProcess) -> None:
        """Makes sure that a server can fork the trial, if that is possible, and sets `mark` and `why_not`.

        If the server has to be started first, waits until it is ready, which takes about as long as a fresh start.

        Raises:
            SupervisorLost: the supervisor has exited or does not answer.
        """
        self.mark, self.why_not = "", self._unusable or why_not(launch.argv, launch.cwd)
        if self.why_not:
            return
        key = Key(interpreter=launch.argv[0], modules=launch.warm, cwd=launch.cwd, environment=server_environment(launch))
        mark = mark_of(study_of(launch.folder), SERVER, launch.slot)
        if self._key is None or not self._is_there(mark, supervisor):
            self._start(key, mark, supervisor, launch)
        elif key != self._key:
            self.why_not = f"the trial differs from the warm server in {_difference(key, self._key)}"
        self.mark = "" if self.why_not else mark

    def give_up(self, why: str) -> None:
        """Ends a server that did not fork, for the reason `why`. The next trial starts another server."""
        if self._supervisor is not None:
            self._supervisor.end_trial(self.mark, after_s=0.0)
        self.mark, self.why_not, self._key = "", why, None

    def _serve(self, key: Key, modules: Sequence[str], mark: str, *, patience_s: float) -> str:
        """Starts a server that imports the modules, and waits until it is ready; returns why it cannot be used, or ""."""
        assert self._supervisor is not None
        argv = [key.interpreter, str(SERVER_SCRIPT), *modules]
        try:
            return self._supervisor.serve(mark, argv=argv, cwd=key.cwd, env=dict(key.environment), patience_s=patience_s)
        except OSError as error:
            return str(error)

    def _is_there(self, mark: str, supervisor: SupervisorProcess) -> bool:
        if self._supervisor is not supervisor or supervisor.end is not None:
            return False
        return not any(message["is"] in ("exited", "gone") for message in supervisor.messages(mark))

    def _start(self, key: Key, mark: str, supervisor: SupervisorProcess, launch: Launch) -> None:
        if self._num_started >= MAX_SERVERS:
            self.why_not = self._unusable = f"the warm server has ended {MAX_SERVERS} times"
            return
        self._num_started += 1
        patience_s = min(READY_S, launch.deadlines.total_s)
        self._supervisor, began_s = supervisor, time.monotonic()
        of_torch = tuple(name for name in key.modules if name in OF_TORCH)
        modules = of_torch if self.why_less else key.modules
        why = self._serve(key, modules, mark, patience_s=patience_s)
        if why and "torch" in of_torch and modules != of_torch and not launch.is_warm_whole:
            self.why_less = why
            began_s = time.monotonic()
            why = self._serve(key, of_torch, mark, patience_s=patience_s)
        self.start_s = time.monotonic() - began_s
        self._key = None if why else key
        self.why_not = self._unusable = f"the warm server cannot be used: {why}" if why else ""


def why_not(argv: Sequence[str], cwd: str) -> str:
    """Returns why a command cannot be started warm; "" if it can. Only `python SCRIPT ...` and `python -m MODULE ...` can."""
    if os.path.basename(argv[0]) == "env":
        return NOT_BY_ENV
    if not PYTHON.fullmatch(os.path.basename(argv[0])) or with_harness(argv) != list(argv):
        return "the command does not begin with an interpreter of Python"
    first = argv[1] if len(argv) > 1 else ""
    if first == "-m" and len(argv) > 2:
        return ""
    if not first or first.startswith("-"):
        return f"the interpreter is given {first}" if first else "the command has no script"
    path = os.path.join(cwd, first)
    if not os.path.isfile(path) or first.endswith(".pyc") or zipfile.is_zipfile(path):
        return f"{first} is not a plain script"
    return ""


def _difference(one: Key, other: Key) -> str:
    if one.environment == other.environment:
        return "the command" if one.interpreter != other.interpreter else "what is imported"
    names = [name for name, value in one.environment.items() if other.environment.get(name) != value]
    return ", ".join(sorted(names)[:3]) or "the environment"
