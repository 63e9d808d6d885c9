"""The soak finds what grows, and nothing else; a short one runs."""

import subprocess
import sys

import numpy as np
import pytest

from autotune.launchers.environment import own_environment
from tests.benchmarks import soak
from tests.benchmarks.commands import ROOT


def lines(*, per_trial=0.0, left=0):
    """Returns what five tuners would have measured in 60 trials each."""
    rng = np.random.default_rng(0)
    found = [
        {"id": str(one), "trial": trial, "descriptors": 20 + per_trial * trial + rng.integers(3), "memory_mib": rng.normal(200)}
        for one in range(5)
        for trial in range(1, 61)
    ]
    found = [{"process": "tuner", "threads": 4, **line} for line in found]
    return [*found, {"study_trials": 300, "study_bytes": 300 * 51200, "left": left, "study_s": 5400}]


def test_a_leak_is_found_with_its_size():
    assert np.mean(soak.slopes(lines(per_trial=0.1), "tuner", "descriptors")) == pytest.approx(10, abs=1.5)
    said, is_clean = soak.report(lines(per_trial=0.1))
    assert not is_clean
    assert "300 trials in 1 studies (1.5 h), 50 KiB of disk a trial, 0 processes left behind" in said


def test_noise_is_no_leak_and_a_process_left_is_one():
    assert soak.report(lines())[1]
    assert not soak.report(lines(left=1))[1]


@pytest.mark.thorough
def test_parts_go_on_from_one_another(tmp_path):
    short = ["--stub", "--each", "3", "--studies", "1", "--file", "soak.jsonl"]
    words = [sys.executable, "-m", "tests.benchmarks.soak", *short]
    for trials in (1, 12):
        environment = {**own_environment(), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*words, "--trials", str(trials)], cwd=tmp_path, env=environment)
        assert done.returncode == 0
    found = soak.read(tmp_path / "soak.jsonl")
    tuners = {line["id"] for line in found if line.get("process") == "tuner"}
    assert len(tuners) >= 2
    assert {line["process"] for line in found if "process" in line} == {"tuner", "supervisor"}
    assert all(line["left"] == 0 for line in found if "left" in line)
