"""The soak detects resources that grow, and does not mistake noise for a leak. A short soak runs to its end."""

import subprocess
import sys

import numpy as np
import pytest

from autotune.launchers.environment import own_environment
from tests.benchmarks import soak
from tests.benchmarks.chaos_engines import OnSlurm


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


def test_noise_passes_and_a_process_left_behind_fails():
    assert soak.report(lines())[1]
    assert not soak.report(lines(left=1))[1]


def measured(folder, *words):
    """Returns what a short soak in this folder has measured so far."""
    short = ["--stub", "--each", "3", "--studies", "1", "--file", "soak.jsonl", *words]
    done = subprocess.run([sys.executable, "-m", "tests.benchmarks.soak", *short], cwd=folder, env=own_environment())
    assert done.returncode == 0
    return soak.read(folder / "soak.jsonl")


@pytest.mark.thorough
def test_short_soak_leaves_no_process_behind_and_leaks_no_descriptors(tmp_path):
    found = measured(tmp_path, "--trials", "1")
    assert [line["left"] for line in found if "left" in line] == [0]
    descriptors = [line["descriptors"] for line in found if line.get("process") == "tuner"]
    assert len(descriptors) >= 2
    assert max(descriptors[1:]) <= descriptors[0] + 2


@pytest.mark.thorough
def test_later_call_appends_its_measurements_to_the_file(tmp_path):
    first = measured(tmp_path, "--trials", "1")
    found = measured(tmp_path, "--trials", str(sum(line.get("study_trials", 0) for line in first) + 1))
    assert found[: len(first)] == first
    tuners = {line["id"] for line in found if line.get("process") == "tuner"}
    assert len(tuners) >= 2
    assert {line["process"] for line in found if "process" in line} == {"tuner", "supervisor"}
    assert all(line["left"] == 0 for line in found if "left" in line)


@pytest.mark.thorough
@pytest.mark.skipif(bool(OnSlurm.why_not()), reason=OnSlurm.why_not())
def test_soak_on_slurm_measures_the_agent_and_its_child_processes(tmp_path):
    found = measured(tmp_path, "--trials", "1", "--slurm")
    ids = {name: {line["id"] for line in found if line.get("process") == name} for name in soak.PROCESSES}
    assert {name: len(there) for name, there in ids.items()} == {"tuner": 1, "agent": 1, "supervisor": 1, "warm server": 0}
    assert len(set.union(*ids.values())) == 3
    assert all(line["left"] == 0 for line in found if "left" in line)
