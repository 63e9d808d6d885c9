"""MLflow's pages of a study with every outcome, as a browser shows them: SQLite and PostgreSQL behind a real server.

With `AUTOTUNE_TEST_MLFLOW=PYTHON`, the MLflow of another environment serves the pages, to try an older version.
"""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.run_dir import StudyFolder
from autotune.testing.studies import make_study
from autotune.trackers import views
from autotune.trackers.sync import sync
from tests.trackers.browser import browser_page
from tests.trackers.outcomes import WANTED, make_study_of_every_outcome
from tests.trackers.postgres import Postgres, why_no_postgres
from tests.trackers.servers import PYTHON_VARIABLE, Mirror, MlflowServer

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own use of SQLAlchemy


class Pages:
    """A server with two programs, and a browser.

    Attributes:
        page: the browser's page.
        study: what MLflow has of the study of every outcome.
    """

    def __init__(self, server: MlflowServer, folder: Any, page: Any) -> None:
        self.url, self.page = server.uri, page
        self.study = Mirror(server.uri, folder.name)
        self.experiment = self.study.parents[0].info.experiment_id
        self.program = views.key(folder.read_study())

    def open(self, address: str) -> Any:
        """Opens an address, given from `#` on."""
        self.page.goto("about:blank")  # a change after `#` alone loads nothing
        self.page.goto(f"{self.url}/{address}")
        return self.page

    def trial(self, outcome: str) -> Any:
        return next(run for run in self.study.trials if run.data.tags["outcome"] == outcome)

    def text(self) -> str:
        return self.page.locator("body").inner_text()

    def is_in_sight(self, text: str) -> bool:
        """Whether a cell of the table shows a text, without scrolling."""
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


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)])
def pages(
    request: pytest.FixtureRequest,
    page: Any,
    studies: list[StudyFolder],
    empty_store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pages]:
    home = tmp_path_factory.mktemp("pages")
    database = None
    if request.param == "postgresql":
        if why := why_no_postgres():
            pytest.skip(why)
        database = Postgres()
    server = MlflowServer(home, store_uri=database.uri if database else None)
    if PYTHON_VARIABLE not in os.environ:  # otherwise of another version
        server.store.write_bytes(empty_store.read_bytes())
    try:
        server.start()
        for each in studies:
            assert sync(each, server.uri).is_complete
        yield Pages(server, studies[0], page)
    finally:
        server.stop()
        if database:
            database.stop()


@pytest.fixture(autouse=True)
def picture(pages: Pages, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps a picture of what the page showed at the test's end."""
    yield
    pages.page.screenshot(path=str(tmp_path_factory.getbasetemp() / f"{request.node.name}.png"))


def test_everything_is_in_the_store(pages, studies):
    assert Mirror(pages.url, "resnet18").problems(studies[1]) == []
    assert pages.study.numbers == [trial.number for trial in studies[0].read_trials()]


def test_table_shows_one_program_by_ratio_with_every_outcome_in_sight(pages):
    page = pages.open(views.page(pages.experiment, pages.program))
    for outcome in WANTED:
        assert pages.is_in_sight(outcome.value), outcome
    for name in ("ratio to baseline", "Samples per second", "step alone per second", "memory GiB"):
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


def test_page_of_a_failed_trial_says_why(pages):
    page = pages.open(views.run_page(pages.experiment, pages.trial("device_oom").info.run_id))
    page.get_by_text("CUDA out of memory").first.wait_for()


def test_description_of_the_experiment_links_the_pages(pages):
    page = pages.open(f"#/experiments/{pages.experiment}/runs?workflowType=machine_learning")
    page.get_by_role("link", name="failures").first.wait_for()
    shown = {link.get_attribute("href") for link in page.get_by_role("link", name="failures").all()}
    assert views.page(pages.experiment, pages.program + views.FAILURES) in shown
