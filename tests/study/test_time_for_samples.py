"""A real study: a configuration that starts slowly and trains fast wins for a long training, but not for a short one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY, PROGRAM = Path(__file__).parents[2], Path(__file__).parent / "programs" / "slow_start.py"


@pytest.mark.thorough
@pytest.mark.parametrize(("samples", "wins"), [(800, False), (1_000_000, True)])
def test_slower_start_wins_only_if_the_training_is_long_enough(tmp_path, samples, wins):
    (tmp_path / "space.yaml").write_text("env.PREPARE: ['0', '1']\n")
    asked = ["search_space=space.yaml", "objective=time_for_samples", f"study.samples={samples}", "study.budget.minutes=2"]
    more = ["measure.finals.max_s=3", "measure.screening.max_s=3", "tracker.uri=none", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "run", *asked, *more, "--", sys.executable, str(PROGRAM)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["best"]["overrides"].get("env.PREPARE") == "1") is wins
    baseline = summary["baseline"]
    start_s = baseline["objectives"]["time_for_samples"] - samples / baseline["value"]
    assert 0.2 < start_s < 20, "the time for N samples, less the training, is the start"
    if wins:
        assert summary["speedup"]["verdict"] == "faster"
        assert 1.5 < summary["speedup"]["ratio"] < 2.2
        # The start is repaid after about 4 s / (0.04 s - 0.02 s) = 200 steps.
        assert 100 < summary["break_even"]["steps"] < 400
