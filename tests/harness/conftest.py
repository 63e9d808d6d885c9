"""Runs a small program under the harness as a launcher would, with thresholds so short that a trial takes seconds."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.harness import protocol

REPOSITORY = Path(__file__).resolve().parents[2]
INJECT = REPOSITORY / "autotune" / "harness" / "inject"
PROGRAMS = Path(__file__).parent / "programs"
SCRIPTS = REPOSITORY / "tests" / "programs" / "scripts"  # the matrix's, which serve here, too
RULES = protocol.MeasureRules(
    warmup_min_device_s=0.1,
    warmup_max_s=3.0,
    warmup_mean_frac=0.5,
    warmup_quartile_frac=0.9,
    block_min_s=0.02,
    min_s=0.2,
    max_s=1.0,
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


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """Returns a function that runs a program of `programs/` (or a whole command) as one trial."""
    number = 0

    def run(program: str, *words: str, argv: list[str] | None = None, **options: Any) -> Run:
        nonlocal number
        number += 1
        folder = tmp_path / f"{number:04d}"
        folder.mkdir()
        environment = options.pop("env", {})
        options.setdefault("rules", RULES)
        spec = protocol.Spec(trial=number, nonce=f"nonce{number}", folder=str(folder), **options)
        protocol.write_json(str(folder / protocol.SPEC_FILE), spec)
        added = {protocol.SPEC_VARIABLE: str(folder / protocol.SPEC_FILE), "PYTHONPATH": str(INJECT), **environment}
        return execute([*(argv or [sys.executable]), str(PROGRAMS / program), *words], folder, added)

    return run


@pytest.fixture
def plain(tmp_path: Path) -> Trial:
    """Returns a function that runs a program of `programs/` without the harness."""

    def run(program: str, *words: str) -> Run:
        return execute([sys.executable, str(PROGRAMS / program), *words], tmp_path, {})

    return run


def execute(argv: list[str], folder: Path, added: dict[str, str]) -> Run:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOTUNE", "PYTHONPATH"))}
    done = subprocess.run(
        argv,
        env={**environment, "OMP_NUM_THREADS": "1", **added},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, folder)


def baseline_then(trial: Trial, program: str, *words: str, knobs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Returns the results of the baseline and of a trial that turns `knobs` at the loader the baseline has found."""
    baseline = trial(program, *words, mode="inspect", **options).result()
    return baseline, trial(program, *words, knobs=knobs, target=baseline.target, **options).result()
