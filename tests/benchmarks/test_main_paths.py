"""Benchmarks that run real programs work to the end at the smallest sizes. Their numbers mean nothing at such sizes."""

import subprocess
import sys

import pytest

from tests.benchmarks.commands import ROOT

GOAL = "goal  "


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words", "last"),
    [
        ("overhead", ["--processes", "1", "--blocks", "2", "--pairs", "1", "--trials", "1"], GOAL),
        ("apply", ["--rounds", "1", "--seconds", "2"], GOAL),
        ("warm", ["--pairs", "1", "--only", "launch-bound"], "before and after"),
        ("truth", ["--only", "loader-1", "--rounds", "1"], GOAL),
        ("outage", ["--trials", "2", "--pairs", "1", "--only", "refused"], GOAL),
        ("budget", ["--minutes", "0.5", "--only", "plain"], "within 0.5 min"),
    ],
)
def test_benchmark_runs_to_its_last_line_of_output(name: str, words: list[str], last: str) -> None:
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert last in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert done.returncode in (0, 1)  # 1: a goal is missed, as it may be at such sizes
