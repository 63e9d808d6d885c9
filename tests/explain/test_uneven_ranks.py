"""`autotune explain` on a study with two processes: one has slow input, and the finding names its rank and the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.config.command import starter
from tests.faults.trial_studies import PROGRAMS, run, start

SPACE = {"parallel.gradient_as_bucket_view": [False, True]}
ONLY_THE_BASELINE = ("study.budget.trials=1", "explain.auto=false")


@pytest.mark.thorough
def test_the_rank_with_slow_input_and_its_line_are_named(tmp_path: Path) -> None:
    start(tmp_path, "uneven.py", SPACE, *ONLY_THE_BASELINE, starter=tuple(starter(2))).finish()
    done = run(tmp_path, "explain", "--passes", "lines", "--minutes", "0", "--json")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["explained"]
    assert entry["passes"]["lines"]["outcome"] == "ok", entry
    finding = next(finding for finding in entry["findings"] if finding["cause"] == "rank skew")
    lines = (PROGRAMS / "uneven.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "# reading is slow on rank 1" in line)
    assert finding["where"] == f"rank 1 at uneven.py:{number}"
    assert "in input: `time.sleep(0.003)" in finding["evidence"]
    # Rank 1 sleeps 12 ms of a step, which otherwise takes less than 6 ms. The ranks could share the 12 ms (low) or save them.
    assert 0.1 < finding["gain"]["low"] < 1 < finding["gain"]["high"]
    assert entry["findings"][0]["cause"] == "rank skew"
