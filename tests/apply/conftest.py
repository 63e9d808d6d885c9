"""Fixtures that write a best.yaml and run programs with it, as a user would."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.harness import protocol
from autotune.launchers.environment import own_environment
from tests.cli.conftest import Cli

PROGRAMS = Path(__file__).parent / "programs"
KNOBS = {
    "loader": {"batch_size": 8, "num_workers": 1},
    "precision": {"amp": "bf16"},
    "layout": {"channels_last": True},
    "optimizer": {"implementation": "fused"},
    "threads": {"intra": 1, "omp": 2},
    "env": {"SEEN_BY_THE_PROGRAM": "yes"},
}


class Place:
    """A folder with programs and a best.yaml.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for program in PROGRAMS.glob("*.py"):
            shutil.copy(program, path)

    def best(self, knobs: dict[str, Any] = KNOBS, **provenance: Any) -> None:
        """Writes best.yaml."""
        (self.path / "best.yaml").write_text(
            f"# @package _global_\n{yaml.safe_dump({**knobs, 'provenance': {'study': 's', **provenance}})}"
        )

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Starts `autotune apply best.yaml -- COMMAND`, or another command line of autotune."""
        words = command if command[0] == "apply" else ("apply", "best.yaml", "--", *command)
        return self.popen([sys.executable, "-m", "autotune", *words], **options)

    def popen(self, argv: list[str], env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Starts a command in the folder."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(argv, cwd=self.path, env={**_environment(), **(env or {})}, text=True, **options)

    def apply(self, *command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `autotune apply best.yaml -- COMMAND` to its end, in a fork of a process that has imported autotune."""
        words = command if command[0] == "apply" else ("apply", "best.yaml", "--", *command)
        cli = Cli(self.path)
        cli.environment = {**_environment(), **(env or {})}
        return cli(*words)


def _environment() -> dict[str, str]:
    return {k: v for k, v in own_environment().items() if not k.startswith(("AUTOTUNE", "OMP_", "SLURM_"))}


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Waits for a process; returns its exit status and output."""
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def seen(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Returns what the program observed, from its one line of standard output."""
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Returns a folder with the programs."""
    return Place(tmp_path)


@pytest.fixture
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Returns a function that finds a program's training loader, as a study's baseline does."""

    def find(*argv: str, cwd: Path) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("trial")
        protocol.write_json(str(folder / "spec.json"), protocol.Spec(trial=0, nonce="n", folder=str(folder), mode="inspect"))
        inject = Path(protocol.__file__).with_name("inject")
        environment = {**os.environ, protocol.SPEC_VARIABLE: str(folder / "spec.json"), "PYTHONPATH": str(inject)}
        subprocess.run([sys.executable, *argv], cwd=cwd, env=environment, check=True, timeout=120, capture_output=True)
        found = protocol.read_result(str(folder / protocol.result_file(0))).target
        assert found
        return found

    return find
