"""The campaign's dry run, with real processes: every stage that a CPU can run ends, and names the checks that need a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.commands import ROOT
from tests.benchmarks.gpu_campaign.__main__ import STAGES
from tests.benchmarks.gpu_campaign.checks import DONE, NOT_RUN


def dry(out: Path, *stages: str) -> dict[str, dict[str, str]]:
    """Runs stages dry; returns {stage: {check: how it ended}}."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu_campaign", "--dry", "--out", str(out), *stages]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((out / "campaign.json").read_text())
    return {name: {entry["name"]: entry["status"] for entry in stage["findings"]} for name, stage in told["stages"].items()}


@pytest.mark.thorough
@pytest.mark.parametrize("stages", [("smoke", "record"), tuple(STAGES)])
def test_dry_run_completes_names_skipped_gpu_checks_and_repeats_no_measurement(stages: tuple[str, ...], tmp_path: Path) -> None:
    found = dry(tmp_path, *stages)
    assert set(found) == set(stages)
    assert {status for stage in found.values() for status in stage.values()} == {DONE, NOT_RUN}
    assert set(found["smoke"].values()) == {NOT_RUN}
    assert all(DONE in stage.values() for name, stage in found.items() if name != "smoke")
    page = (tmp_path / "campaign.md").read_text()
    assert page.startswith("# A dry run: small sizes, the numbers mean nothing")
    assert "no CUDA device: " in page
    assert "tests/gpu/test_memory_limits.py" in page
    assert "truth" not in stages or "not judged, dry" in page
    measured = json.loads((tmp_path / "campaign.json").read_text())
    assert dry(tmp_path, *stages) == found
    again = json.loads((tmp_path / "campaign.json").read_text())
    assert {**again, "goes": []} == {**measured, "goes": []}
