"""The campaign never repeats a measurement, names the checks that need a GPU, and survives a broken check."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.gpu_campaign import __main__ as campaign
from tests.benchmarks.gpu_campaign import document, page
from tests.benchmarks.gpu_campaign.checks import (
    DONE,
    FAILED,
    LATER,
    MISSED,
    NOT_RUN,
    Check,
    Finding,
    Found,
    Goal,
    Missing,
    Place,
    run_stage,
)
from tests.benchmarks.gpu_campaign.document import Document

HOST = {
    "cpu_model": "EPYC", "num_cores": 2, "memory_bytes": 2**34, "isa": [], "kernel": "6", "python": "3.12", "gpus": [],
    "topology": None, "environment": {},
}  # fmt: skip
Run = Callable[..., list[Finding]]


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "host_facts", lambda: dict(HOST))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns a function that runs checks as a new process would, from the documents on disk."""

    def run_checks(*checks: Check, is_dry: bool = False, has_cuda: bool = False, left_s: float = 60.0) -> list[Finding]:
        told = Document(tmp_path, is_dry=is_dry)
        told.begin(["smoke"])
        place = Place(
            stage="smoke",
            folder=tmp_path / "work",
            results=tmp_path,
            document=told,
            is_dry=is_dry,
            until_s=time.monotonic() + left_s,
        )
        found = list(run_stage(place, checks, has_cuda=has_cuda))
        page.write_page(tmp_path, told, {"smoke": "does it work?", "truth": "is it true?"})
        return found

    return run_checks


def broken(_: Place) -> Found:
    raise RuntimeError("boom")


def missing(_: Place) -> Found:
    raise Missing("transformers is not installed")


def goal(value: float) -> Goal:
    return Goal(what="ratio", value=value, bound=1.05)


def test_stage_continues_after_a_failed_check_and_names_checks_that_did_not_run(run: Run, tmp_path: Path) -> None:
    findings = run(
        Check(name="breaks", run=broken),
        Check(name="needs a GPU", run=broken, needs_cuda="CUDA graphs"),
        Check(name="needs a library", run=missing),
        Check(name="works", run=lambda place: Found(evidence=place.stage)),
    )
    assert [finding.status for finding in findings] == [FAILED, NOT_RUN, NOT_RUN, DONE]
    assert findings[1].evidence == "no CUDA device: CUDA graphs"
    assert findings[2].evidence == "transformers is not installed"
    text = (tmp_path / page.FILE).read_text()
    assert "RuntimeError: boom" in text
    assert "EPYC, 2 cores" in text
    assert "## truth: is it true?\n\nNot begun." in text
    assert "boom" in (tmp_path / "work" / "breaks.txt").read_text()


def test_second_run_repeats_only_failed_checks(run: Run) -> None:
    runs = []

    def fails_once(place: Place) -> Found:
        runs.append("fails once")
        if len(runs) == 1:
            raise RuntimeError("boom")
        return Found(evidence="again")

    def missed(_: Place) -> Found:
        runs.append("missed")
        return Found(evidence="slow", goals=[goal(1.0)])

    checks = [Check(name="fails once", run=fails_once), Check(name="missed", run=missed)]
    assert [finding.status for finding in run(*checks)] == [FAILED, MISSED]
    assert [finding.status for finding in run(*checks)] == [DONE, MISSED]
    assert runs == ["fails once", "missed", "fails once"]


def test_interrupted_check_keeps_its_measurements(run: Run) -> None:
    measured = []

    def measure(name: str) -> str:
        measured.append(name)
        if measured == ["a", "b"]:
            raise KeyboardInterrupt
        return name.upper()

    def check(place: Place) -> Found:
        return Found(evidence="".join(place.kept(name, lambda name=name: measure(name)) for name in "abc"))

    with pytest.raises(KeyboardInterrupt):
        run(Check(name="three", run=check))
    assert run(Check(name="three", run=check))[0].evidence == "ABC"
    assert measured == ["a", "b", "b", "c"]


def test_check_without_enough_time_or_with_a_partial_result_is_left_for_later(run: Run) -> None:
    checks = [
        Check(name="long, but the first", run=lambda _: Found(evidence="half", is_whole=False), seconds=900.0),
        Check(name="long", run=lambda _: Found(evidence="done"), seconds=900.0),
        Check(name="short", run=lambda _: Found(evidence="done"), seconds=1.0),
    ]
    assert [finding.status for finding in run(*checks)] == [LATER, LATER, DONE]
    whole = [Check(name=checks[0].name, run=lambda _: Found(evidence="whole")), *checks[1:]]
    assert [finding.status for finding in run(*whole, left_s=2000.0)] == [DONE, DONE, DONE]


@pytest.mark.parametrize(("is_dry", "status", "words"), [(False, MISSED, "MISSED"), (True, DONE, "not judged, dry")])
def test_goals_are_judged_unless_the_run_is_dry(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_dry: bool, status: str, words: str
) -> None:
    checks = [Check(name="ratio", run=lambda _: Found(evidence="1.0", goals=[goal(1.0)]))]
    assert [finding.status for finding in run(*checks, is_dry=is_dry)] == [status]
    assert f"ratio: 1, goal at least 1.05: {words}" in capsys.readouterr().out
    assert f"- ratio: 1, goal at least 1.05: {words}" in (tmp_path / page.FILE).read_text()


def test_campaign_refuses_to_mix_machines_or_dry_and_real_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    with pytest.raises(SystemExit, match=r"has is_dry False, here it is True\. Give another folder"):
        run(is_dry=True)
    monkeypatch.setattr(document, "host_facts", lambda: {**HOST, "num_cores": 16})
    with pytest.raises(SystemExit, match="has num_cores 2, here it is 16"):
        run()


def test_document_records_the_machine_versions_and_each_run(run: Run, tmp_path: Path) -> None:
    run()
    run()
    told = json.loads((tmp_path / document.FILE).read_text())
    assert told["machine"] == HOST
    assert told["versions"]["torch"]
    assert [go["stages"] for go in told["goes"]] == [["smoke"], ["smoke"]]


def test_unknown_stage_is_refused_with_a_list_of_the_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_campaign", "smoke", "speed"])
    with pytest.raises(SystemExit) as ended:
        campaign.main()
    assert ended.value.code == 2
    assert "STAGE: there is no speed. There are smoke, tutorial, record," in capsys.readouterr().err


@pytest.mark.parametrize("name", campaign.STAGES)
def test_check_names_in_a_stage_are_unique_in_dry_and_real_runs(name: str) -> None:
    for is_dry in (False, True):
        names = [check.name for check in campaign.STAGES[name].checks(is_dry)]
        assert len(set(names)) == len(names) > 0


def test_smoke_stage_covers_every_gpu_test_file_with_a_check_that_needs_cuda() -> None:
    checks = {name for check in campaign.STAGES["smoke"].checks(False) for name in check.needs_cuda.split(", ")}
    files = sorted((document.ROOT / "tests" / "gpu").glob("test_*.py"))
    assert files
    assert {str(path.relative_to(document.ROOT)) for path in files} <= checks
    assert all("pytestmark = pytest.mark.gpu" in path.read_text() for path in files)
