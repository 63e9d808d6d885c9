"""A study's journal in the real optuna-dashboard: the server's answers, and the page in a browser."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.records import Kind, Outcome
from tests.report import made
from tests.support.fake_launcher import Failure
from tests.support.ports import free_port
from tests.trackers.browser import browser_page
from tests.trackers.servers import START_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("optuna_dashboard") is None,
    reason="no optuna-dashboard: misses what it shows of a study's journal (pip install optuna-dashboard)",
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A study whose fastest configurations, those with bf16, are all unsteady."""

    def unsteady(trial: int, knobs: Any) -> Failure | None:
        return Failure(is_unsteady=True) if knobs.get("precision.amp") == "bf16" else None

    bench = made.bench(tmp_path_factory.mktemp("study"), of=made.surface(failures=unsteady), minutes=4)
    bench.run()
    return bench


@pytest.fixture(scope="module")
def address(study: Any) -> Iterator[str]:
    """optuna-dashboard, started as docs/what-is-written.md says."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    program = Path(sys.executable).with_name("optuna-dashboard")
    command = [str(program), str(study.folder.journal_file), "--port", str(port)]
    with (study.folder.path / "dashboard.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait(f"{address}/api/studies", process)
        yield address
    finally:
        process.terminate()
        process.wait(20)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"optuna-dashboard did not start: {process.args}")


def _answer(address: str, place: str) -> Any:
    with urllib.request.urlopen(f"{address}/api/{place}", timeout=10) as answer:
        return json.loads(answer.read())


def _number(trial: dict[str, Any]) -> int:
    """Returns the number of a trial in the study's folder."""
    (number,) = [int(each["value"]) for each in trial["user_attrs"] if each["key"] == "trial"]
    return number


def _searched(study: Any) -> dict[int, Any]:
    return {trial.number: trial for trial in study.trials if trial.kind in (Kind.baseline, Kind.search)}


@pytest.mark.thorough
def test_dashboard_server_returns_name_axis_and_every_trial_of_the_search(study, address):
    (summary,) = _answer(address, "studies")["study_summaries"]
    assert summary["study_name"] == study.folder.name
    assert summary["directions"] == ["maximize"]
    shown = _answer(address, f"studies/{summary['study_id']}")
    assert shown["objective_names"] == ["samples per second"]
    assert {each["key"] for each in shown["union_user_attrs"]} == {"trial", "measured"}
    assert {each["name"] for each in shown["union_search_space"]} == {
        "loader.batch_size", "loader.num_workers", "precision.amp",
    }  # fmt: skip
    ran = [trial for trial in shown["trials"] if trial["state"] == "Complete"]  # a proposal without a trial is "Fail"
    assert set(map(_number, ran)) == set(_searched(study))


def test_best_trial_of_the_dashboard_is_the_fastest_steady_one(study, address):
    searched = _searched(study)
    steady = max((trial for trial in searched.values() if trial.outcome is Outcome.ok), key=lambda trial: trial.value)
    assert max(searched.values(), key=lambda trial: trial.value or 0.0).outcome is Outcome.unsteady
    (best,) = _answer(address, "studies/0")["best_trials"]
    assert (_number(best), best["values"]) == (steady.number, [steady.value])


def test_first_trial_of_the_dashboard_is_the_baseline_with_a_duration(study, address):
    first = _answer(address, "studies/0")["trials"][0]
    began, ended = (first[f"datetime_{name}"] for name in ("start", "complete"))
    assert began < ended
    assert _number(first) == 0


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    yield from browser_page(tmp_path / "profile")


@pytest.mark.thorough
def test_dashboard_page_names_the_axis_the_best_trial_and_the_knobs(study, address, page):
    (best,) = _answer(address, "studies/0")["best_trials"]
    page.goto(f"{address}/dashboard/studies/0")
    page.get_by_text(f"Best Trial (number={best['number']})").wait_for()
    page.locator(".js-plotly-plot .ytitle").first.wait_for()
    shown = page.locator("body").inner_text()
    page.goto(f"{address}/dashboard/studies/0/trials?numbers={best['number']}")
    page.get_by_text("User Attributes").first.wait_for()
    detail = page.locator("body").inner_text()
    assert f"{study.folder.name} (id=0)" in shown
    assert "samples per second" in shown
    assert "precision.amp: off" in shown
    assert str(best["values"][0]) in shown
    assert re.search(rf"trial\s+{_number(best)}\b", detail)
