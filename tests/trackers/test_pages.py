"""MLflow's pages of a study with every outcome, in a browser: `autotune ui`, a server with PostgreSQL, and MLflow 3.10.

MLflow 3.10, the oldest supported version, runs in a separate environment. The client is always the running environment's.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.parse
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.run_dir import StudyFolder
from autotune.trackers import views
from autotune.trackers.sync import sync
from tests.support.studies import make_study
from tests.trackers.browser import browser_page
from tests.trackers.outcomes import WANTED, make_study_of_every_outcome
from tests.trackers.postgres import Postgres, why_no_postgres
from tests.trackers.servers import Mirror, MlflowServer

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow uses deprecated parts of SQLAlchemy
OLDEST = "3.10"  # the minimum in pyproject.toml


class Pages:
    """An MLflow server with studies of two programs, and a browser.

    Attributes:
        page: the browser's page.
        study: the runs of the study with every outcome.
        has_column_order: whether the table's columns have the order of the view.
    """

    def __init__(self, url: str, folder: Any, page: Any, *, has_column_order: bool) -> None:
        self.url, self.page, self.has_column_order = url, page, has_column_order
        self.study = Mirror(url, folder.name)
        self.experiment = self.study.parents[0].info.experiment_id
        self.program = views.key(folder.read_study())

    def open(self, address: str) -> Any:
        """Opens an address, given as the part from `#` on."""
        self.page.goto("about:blank")  # because a change only after `#` would not reload the page
        self.page.goto(f"{self.url}/{address}")
        return self.page

    def trial(self, outcome: str) -> Any:
        return next(run for run in self.study.trials if run.data.tags["outcome"] == outcome)

    def text(self) -> str:
        return self.page.locator("body").inner_text()

    def is_in_sight(self, text: str) -> bool:
        """Returns whether a cell of the table shows the text without scrolling."""
        cell = self.page.get_by_role("gridcell", name=text, exact=True).first
        cell.wait_for()
        return cell.bounding_box()["y"] < self.page.viewport_size["height"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from browser_page(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> list[StudyFolder]:
    runs = tmp_path_factory.mktemp("studies") / "runs"
    return [make_study_of_every_outcome(runs), make_study(runs)]


def _oldest_mlflow(folder: Path) -> Path:
    """Returns the interpreter of a new environment with the latest patch release of the oldest supported MLflow."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", f"mlflow=={OLDEST}.*"]
    made = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
    if made.returncode:
        pytest.skip(f"no package index: misses MLflow {OLDEST} ({made.stderr.strip().splitlines()[-1]})")
    return python


@contextlib.contextmanager
def _another_server(kind: str, home: Path) -> Iterator[str]:
    """Yields the address of a server with PostgreSQL, or of the oldest MLflow."""
    database = None
    if kind == "postgresql":
        if why := why_no_postgres():
            pytest.skip(why)
        database = Postgres()
    python = sys.executable if database else _oldest_mlflow(home / "environment")
    server = MlflowServer(home, store_uri=database.uri if database else None, python=python)
    try:
        server.start()
        yield server.uri
    finally:
        server.stop()
        if database:
            database.stop()


@pytest.fixture(
    scope="module",
    params=["ui", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("postgresql", f"mlflow-{OLDEST}"))],
)
def pages(
    request: pytest.FixtureRequest, page: Any, studies: list[StudyFolder], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pages]:
    kind = request.param
    if kind == "ui":  # its server has the study resnet18 already
        server = contextlib.nullcontext(request.getfixturevalue("ui").url)
    else:
        server = _another_server(kind, tmp_path_factory.mktemp("pages"))
    with server as url:
        for each in studies:
            assert sync(each, url).is_complete
        yield Pages(url, studies[0], page, has_column_order=kind != f"mlflow-{OLDEST}")


@pytest.fixture(autouse=True)
def picture(pages: Pages, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Saves a picture of the page at the end of the test."""
    yield
    pages.page.screenshot(path=str(tmp_path_factory.getbasetemp() / f"{request.node.name}.png"))


def test_store_contains_every_trial_of_both_studies(pages, studies):
    assert Mirror(pages.url, "resnet18").problems(studies[1]) == []
    assert pages.study.numbers == [trial.number for trial in studies[0].read_trials()]


def test_table_shows_one_program_by_ratio_with_every_outcome_in_sight(pages):
    page = pages.open(views.page(pages.experiment, pages.program))
    page.get_by_role("columnheader", name="ratio to baseline").first.wait_for()
    if not pages.has_column_order:  # the outcomes are off screen, but the red crosses and the reasons are visible
        failed = page.get_by_role("link", name=re.compile(r"^000[2-6] "))
        assert len({link.inner_text() for link in failed.all() if link.bounding_box()["y"] < 1000}) == 5
        page.locator(".ag-body-horizontal-scroll-viewport").evaluate("each => { each.scrollLeft = each.scrollWidth }")
    for outcome in WANTED:
        assert pages.is_in_sight(outcome.value), outcome
    page.locator(".ag-body-horizontal-scroll-viewport").evaluate("each => { each.scrollLeft = 0 }")
    for name in ("ratio to baseline", "ratio measured once", "Samples per second", "step alone per second", "memory GiB"):
        page.get_by_role("columnheader", name=name).first.wait_for()
    assert not page.get_by_role("gridcell", name="resnet18").count()
    assert "Model training" in pages.text()


def test_failures_have_a_page_with_their_reasons(pages):
    page = pages.open(views.page(pages.experiment, pages.program + views.FAILURES))
    page.get_by_text("CUDA out of memory").first.wait_for()
    shown = pages.text()
    assert "0000 baseline" not in shown
    assert all(outcome.value in shown for outcome in WANTED if outcome.value not in ("ok", "raced"))


def test_charts_show_rate_memory_and_knobs_and_no_nan(pages):
    page = pages.open(views.page(pages.experiment, pages.program, charts=True))
    page.locator(".js-plotly-plot").nth(1).wait_for()
    page.get_by_text("Parallel Coordinates").first.scroll_into_view_if_needed()
    page.locator(".parcoords").first.wait_for()
    shown = pages.text() + " ".join(page.locator("svg text").all_text_contents())
    assert "Samples per second" in shown
    assert "memory GiB" in shown
    assert "progress/baseline per second" in shown
    assert "NaN" not in shown


def test_compare_page_opens_on_the_rate(pages):
    chosen = [run.info.run_id for run in pages.study.trials if run.data.tags["outcome"] in ("ok", "raced", "unsteady")]
    asked = {"runs": json.dumps(chosen), "experiments": json.dumps([pages.experiment]), "workflowType": "machine_learning"}
    page = pages.open(f"#/compare-runs?{urllib.parse.urlencode(asked)}")
    page.locator(".axis-title").first.wait_for()
    axes = [title.strip() for title in page.locator(".axis-title").all_text_contents()]
    assert axes[-1] == "Samples per second"
    assert not [name for name in axes if "memory" in name]
    assert "NaN" not in " ".join(page.locator("svg text").all_text_contents())


def test_page_of_a_failed_trial_shows_the_reason(pages):
    page = pages.open(f"#/experiments/{pages.experiment}/runs/{pages.trial('device_oom').info.run_id}")
    page.get_by_text("CUDA out of memory").first.wait_for()


def test_description_of_the_experiment_links_the_pages(pages):
    page = pages.open(f"#/experiments/{pages.experiment}/runs?workflowType=machine_learning")
    page.get_by_role("link", name="failures").first.wait_for()
    shown = {link.get_attribute("href") for link in page.get_by_role("link", name="failures").all()}
    assert views.page(pages.experiment, pages.program + views.FAILURES) in shown
