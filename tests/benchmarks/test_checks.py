"""The campaign: what is done stays done, what a CPU cannot tell is named, a broken check leaves the others alone."""

import json
from pathlib import Path

from tests.benchmarks.gpu_campaign.checks import FAILED, NOT_RUN, PASSED, Check, run_stage


def broken(_: Path) -> str:
    raise RuntimeError("boom")


def test_a_stage_goes_on_after_a_broken_check_and_names_what_was_not_run(tmp_path: Path) -> None:
    checks = [
        Check(name="breaks", run=broken),
        Check(name="needs a GPU", run=broken, needs_cuda="CUDA graphs"),
        Check(name="works", run=lambda place: place.name),
    ]
    findings = run_stage("smoke", checks, tmp_path, has_cuda=False)
    assert [finding.status for finding in findings] == [FAILED, NOT_RUN, PASSED]
    assert findings[1].evidence == "no CUDA device: CUDA graphs"
    page = (tmp_path / "smoke.md").read_text()
    assert "RuntimeError: boom" in page
    assert "machine" in page


def test_what_passed_is_not_run_again(tmp_path: Path) -> None:
    runs = []

    def count(_: Path) -> str:
        runs.append(1)
        return "counted"

    for _ in range(2):
        findings = run_stage("smoke", [Check(name="counts", run=count)], tmp_path, has_cuda=True)
    assert len(runs) == 1
    assert findings[0].evidence == "counted"
    assert json.loads((tmp_path / "smoke.json").read_text())[0]["status"] == PASSED
