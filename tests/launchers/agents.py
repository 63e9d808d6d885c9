"""A launcher that starts its agent as a plain process on this machine, without Slurm or Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.launchers.base import Launcher
from autotune.launchers.environment import own_environment
from autotune.launchers.link import Link
from autotune.launchers.local import LocalLauncher
from autotune.launchers.remote import Place, RemoteLauncher
from autotune.launchers.transport import Transport, end_process
from tests.support.launcher_contract import SHORT, a_launch, wait
from tests.support.stub_programs import program

AGENT = (sys.executable, "-m", "autotune.launchers.node")


class Pipes(Transport):
    def __init__(self, argv: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, env={**own_environment(), **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.link = Link(os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno()))
        self.process.stdin.close()
        self.process.stdout.close()

    def why_waiting(self) -> str:
        return "Resources"

    def refusal(self) -> BadInput:
        return BadInput(f"launcher: the agent ended with status {self.process.wait()}")

    def why_lost(self) -> str:
        return "" if self.process.poll() is None else f"it ended with status {self.process.returncode}"

    def close(self) -> None:
        end_process(self.process, self.link)


class PipeLauncher(RemoteLauncher):
    """A launcher whose agents are plain processes; `started` lists them."""

    engine = "the test"

    def __init__(
        self,
        place: Place,
        *,
        argv: Sequence[str] = AGENT,
        environment: dict[str, str] | None = None,
        patience_s: float | None = None,
    ) -> None:
        super().__init__(place, graces=SHORT, patience_s=patience_s)
        self._argv, self._added = argv, environment or {}
        self.started: list[Pipes] = []

    def transport(self) -> Transport:
        self.started.append(Pipes(self._argv, self._added))
        return self.started[-1]


def place(folder: Path) -> Place:
    """Returns a place on this machine, with `folder` as the working directory and runs folder."""
    return Place(cwd=str(folder), program=sys.executable, runs_dir=str(folder), device=("cpu", 0, 1))


def ready(launcher: Launcher, within_s: float = 30.0) -> Launcher:
    """Waits until the launcher has a slot."""
    give_up_s = time.monotonic() + within_s
    while not launcher.slots():
        assert time.monotonic() < give_up_s, launcher.why_waiting()
        time.sleep(0.02)
    return launcher


def environment(launcher: Launcher, folder: Path, **env: str) -> dict[str, str]:
    """Returns the environment of a trial, in which STUDY replaces the path of the study's folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    found = wait(launcher.start(a_launch(folder, program("result(detected=dict(os.environ))"), env=env))).results[0].detected
    return dict(json.loads(json.dumps(found).replace(str(folder.parent.parent), "STUDY")))


def environments(
    launcher: Launcher, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the environment of a trial that the local launcher starts, and of a trial that `launcher` starts."""
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OF_THE_USER", "ü")
    local = LocalLauncher()
    here = environment(local, runs / "local" / "trials" / "0007", ADDED="yes")
    local.close()
    return here, environment(ready(launcher), folder, ADDED="yes")
