"""Runs a small program under the harness as a launcher would. Thresholds are short, so a trial takes seconds."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.harness import protocol
from tests.harness.forks import Forks, Server, of_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
INJECT = REPOSITORY / "autotune" / "harness" / "inject"
PROGRAMS = Path(__file__).parent / "programs"
SCRIPTS = REPOSITORY / "tests" / "programs" / "scripts"  # shared with the tests of programs
RULES = protocol.MeasureRules(
    warmup_min_device_s=0.1,
    warmup_max_s=3.0,
    warmup_mean_frac=0.5,
    warmup_quartile_frac=0.9,
    block_min_s=0.02,
    min_s=0.2,
    max_s=1.0,
    cycles_max_s=1.5,  # a pause of a busy machine may be the first of several; their cycle is not awaited for long
    slow_max_s=1.0,
    half_width_frac=0.5,
)


@dataclasses.dataclass
class Run:
    returncode: int
    stdout: str
    stderr: str
    folder: Path

    def result(self, rank: int = 0) -> protocol.RankResult:
        path = self.folder / protocol.result_file(rank)
        assert path.exists(), f"no result; exit {self.returncode}\n{self.stdout}\n{self.stderr}"
        return protocol.read_result(str(path))

    @property
    def has_result(self) -> bool:
        return (self.folder / protocol.result_file(0)).exists()


Trial = Callable[..., Run]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The process that has imported torch. It starts when a test first needs it."""
    with served(tmp_path_factory) as made:
        yield made


@contextlib.contextmanager
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yields the process that all workers share, and ends it."""
    own = tmp_path_factory.getbasetemp()
    made = Server(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own, environment({"PYTHONPATH": ""}))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def forks(server: Server) -> Iterator[Forks]:
    """The process whose forks become programs."""
    with server.forks() as made:
        yield made


@pytest.fixture
def trial(tmp_path: Path, request: pytest.FixtureRequest) -> Trial:
    """Returns what `trials_in` does, for one test."""
    return trials_in(tmp_path, request)


def trials_in(place: Path, request: pytest.FixtureRequest) -> Trial:
    """Returns a function that runs a program of `programs/` (or a whole command) as one trial.

    For speed, each rank is a fork of a process that has imported torch. Pass `is_fresh=True` for a new interpreter, to test
    what happens at an interpreter's start or when libraries are loaded.
    """
    number = 0

    def run(program: str, *words: str, argv: list[str] | None = None, ranks: int = 1, **options: Any) -> Run:
        nonlocal number
        number += 1
        folder = place / f"{number:04d}"
        folder.mkdir()
        added, is_fresh = options.pop("env", {}), options.pop("is_fresh", argv is not None)
        options.setdefault("rules", RULES)
        spec = protocol.Spec(trial=number, nonce=f"nonce{number}", folder=str(folder), **options)
        protocol.write_json(str(folder / protocol.SPEC_FILE), spec)
        added = {protocol.SPEC_VARIABLE: str(folder / protocol.SPEC_FILE), "PYTHONPATH": str(INJECT), **added}
        command = [str(PROGRAMS / program), *words]
        if is_fresh:
            return execute([*(argv or [sys.executable]), *command], folder, added)
        server: Forks = request.getfixturevalue("forks")
        return Run(*server.run(command, folder, of_ranks(ranks, added)), folder)

    return run


@pytest.fixture
def plain(tmp_path: Path, forks: Forks) -> Trial:
    """Returns a function that runs a program of `programs/` without the harness."""

    def run(program: str, *words: str) -> Run:
        return Run(*forks.run([str(PROGRAMS / program), *words], tmp_path, [{}]), tmp_path)

    return run


def environment(added: dict[str, str]) -> dict[str, str]:
    """Returns the tests' environment without autotune's variables and PYTHONPATH, with one OpenMP thread, and with `added`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOTUNE", "PYTHONPATH"))}
    return {**own, "OMP_NUM_THREADS": "1", **added}


def execute(argv: list[str], folder: Path, added: dict[str, str]) -> Run:
    done = subprocess.run(
        argv,
        env=environment(added),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, folder)


def baseline_then(trial: Trial, program: str, *words: str, knobs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Returns the results of the baseline and of a trial that sets `knobs` on the loader that the baseline has found."""
    baseline = trial(program, *words, mode="inspect", **options).result()
    return baseline, trial(program, *words, knobs=knobs, target=baseline.target, **options).result()
