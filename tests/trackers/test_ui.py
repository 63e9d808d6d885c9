"""The real `autotune ui`, and a study's pages in a browser. `test_pages.py` reads the pages of all outcomes there."""

import errno
import http.server
import json
import os
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.parse

import pytest

from autotune.cli import ui as ui_module
from autotune.cli.main import main
from autotune.cli.sync import sync_all
from autotune.errors import AutotuneError, BadInput
from autotune.trackers import store
from tests.support.studies import make_study
from tests.trackers.browser import browser_page
from tests.trackers.servers import Ui

pytestmark = pytest.mark.filterwarnings("ignore")  # the store is made here, and MLflow uses deprecated parts of SQLAlchemy


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    yield from browser_page(tmp_path_factory.mktemp("profile"))


@pytest.fixture
def shoot(page, tmp_path_factory, request):
    """Saves a picture of the page at the end of the test, for people to look at."""
    yield
    page.screenshot(path=str(tmp_path_factory.getbasetemp() / f"{request.node.name}.png"))


@pytest.mark.usefixtures("shoot")
def test_the_printed_address_shows_the_trials_with_knobs_and_outcomes(ui, page):
    page.goto(ui.printed)
    page.get_by_text("0005 bf16 channels_last batch 64 workers 2").first.wait_for()
    page.get_by_role("columnheader", name="Samples per second").first.wait_for()
    page.get_by_text("0003 batch 4096").first.wait_for()


@pytest.mark.thorough
@pytest.mark.usefixtures("shoot")
def test_compare_page_shows_the_parameters_of_the_trials(ui, page):
    found = ui.runs()
    wanted = [found[name]["info"]["run_id"] for name in ("0000 baseline", "0001 bf16 channels_last")]
    runs, experiments = (urllib.parse.quote(json.dumps(x)) for x in (wanted, [ui.experiment]))
    page.goto(f"{ui.url}/#/compare-runs?runs={runs}&experiments={experiments}&workflowType=machine_learning")
    for text in ("precision.amp", "bf16", "loader.batch_size", "Samples per second"):
        page.get_by_text(text).first.wait_for()
    page.get_by_text("Parameters", exact=True).last.scroll_into_view_if_needed()


@pytest.mark.usefixtures("shoot")
def test_study_page_shows_the_verdict(ui, page):
    parent = ui.runs()["resnet18"]["info"]["run_id"]
    page.goto(f"{ui.url}/#/experiments/{ui.experiment}/runs/{parent}")
    page.get_by_text("faster: 2.41x").first.wait_for()


@pytest.mark.usefixtures("shoot")
def test_report_is_shown_among_the_artifacts_of_the_study(ui, page):
    parent = ui.runs()["resnet18"]["info"]["run_id"]
    page.goto(f"{ui.url}/#/experiments/{ui.experiment}/runs/{parent}/artifacts/report.html")
    frame = page.frame_locator("iframe#html")
    frame.get_by_text("faster: 2.41x").first.wait_for()
    frame.locator("details:not([open]) summary").first.click()
    frame.locator("details[open] td").first.wait_for()


def test_server_returns_a_run_for_every_trial(ui):
    assert len(ui.runs()) == 9


def test_studies_that_are_not_shown_are_named(ui):
    (line,) = [line for line in ui.lines if "not shown" in line]
    assert "not shown, because tracked elsewhere or not at all: elsewhere. To show it here, too: autotune sync STUDY" in line


def test_store_is_accessible_only_by_its_owner(empty_store):
    assert empty_store.stat().st_mode & 0o077 == 0


def test_ui_runs_only_one_server(ui):
    assert len(ui.children) <= 3  # MLflow's command, its server, Python's resource tracker


@pytest.mark.thorough
def test_ui_on_another_address_answers_under_the_names_of_this_machine(tmp_path):
    make_study(tmp_path / "runs")
    shown = Ui(tmp_path, "--host", "127.0.0.2")
    try:
        name = f"{socket.gethostname()}:{urllib.parse.urlsplit(shown.url).port}"
        for asked in (shown.url.removeprefix("http://"), name):
            assert len(shown.runs(Host=asked, Origin=f"http://{asked}")) == 9
        with pytest.raises(urllib.error.HTTPError, match="403"):
            shown.runs(Origin="http://elsewhere.example")
    finally:
        shown.end(signal.SIGTERM)


def test_address_of_a_tracking_server_is_printed_and_no_server_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(store.URI_VARIABLE, "http://me:secret@server:5000")
    assert main(["ui"]) == 0
    assert "http://***@server:5000" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_no_server_is_started_for_studies_on_databricks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(store.URI_VARIABLE, "databricks://profile")
    assert main(["ui"]) == 0
    assert "tracked by Databricks" in capsys.readouterr().out


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers like MLflow: it is up, and has one experiment."""

    def do_GET(self):
        body = json.dumps({"experiment": {"experiment_id": "7", "tags": []}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_server_on_this_machine_is_reached_without_the_proxy(tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(ui_module, "START_S", 20.0)
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server, open(tmp_path / "log", "wb+") as log:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        process = subprocess.Popen(["sleep", "60"])
        try:
            ui_module._wait_until_up(process, url, log)
            assert "/#/experiments/7" in ui_module._page(url, tmp_path, ui_module.NO_PROXY)
            make_study(tmp_path).config_file.write_text("tracker:\n  experiment: ${oc.env:UNSET}\n", encoding="utf-8")
            assert ui_module._page(url, tmp_path, ui_module.NO_PROXY) == url
        finally:
            process.kill()
            process.wait()
            server.shutdown()


def test_server_ends_at_once_if_its_parent_is_already_dead():
    with subprocess.Popen(["sleep", "600"], preexec_fn=ui_module._die_with(os.getppid())) as orphan:
        assert orphan.wait(10) == 1
    with subprocess.Popen(["true"], preexec_fn=ui_module._die_with(os.getpid())) as child:
        assert child.wait(10) == 0


@pytest.mark.parametrize(("how", "num"), [("exit 2", 1), ("kill -9 $$", ui_module.SYNCS)])
def test_no_server_starts_without_a_store_and_only_a_killed_sync_is_repeated(tmp_path, monkeypatch, capfd, how, num):
    """A killed server would leave a half-made store. A failed sync has printed its reason, and does not run again."""
    make_study(tmp_path / "runs")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho why >&2\n{how}\n")
    python.chmod(0o700)
    monkeypatch.setattr(ui_module.sys, "executable", str(python))
    runs = tmp_path / "runs"
    with pytest.raises(AutotuneError, match=r"the tracking store sqlite:////.*mlflow\.db could not be made"):
        ui_module._serve(store.embedded_uri(runs), runs, host="127.0.0.1", port=None)
    assert not store.store_file(runs).exists()
    assert capfd.readouterr().err.splitlines().count("why") == num


@pytest.mark.parametrize(("code", "kind"), [(2, BadInput), (1, AutotuneError)])
def test_exit_status_without_a_store_is_that_of_the_sync_that_failed(tmp_path, monkeypatch, code, kind):
    """It was 1, a fault of autotune, for a runs folder that cannot be written."""
    make_study(tmp_path)
    monkeypatch.setattr(ui_module, "_sync", lambda *_: code)
    with pytest.raises(AutotuneError) as raised:
        ui_module._bring_up_to_date(tmp_path)
    assert type(raised.value) is kind


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path, monkeypatch):
    make_study(tmp_path)
    monkeypatch.setattr(ui_module.os, "access", lambda *_: False)  # root may write anywhere
    monkeypatch.setattr(ui_module, "_sync", lambda *_: pytest.fail("MLflow was started"))
    with pytest.raises(BadInput, match=r"--runs-dir: cannot be written, so .* got '.*'\. Make it writable") as raised:
        ui_module._bring_up_to_date(tmp_path)
    assert len(raised.value.problems) == 1


@pytest.mark.thorough
def test_ui_makes_an_empty_store_if_all_studies_are_tracked_elsewhere(tmp_path, capsys):
    study = make_study(tmp_path)
    study.config_file.write_text("tracker:\n  uri: none\n")
    ui_module._bring_up_to_date(tmp_path)
    assert "not shown, because tracked elsewhere or not at all" in capsys.readouterr().err
    assert store.store_file(tmp_path).exists()


@pytest.mark.parametrize("uri", ["none", "null"], ids=["tracked elsewhere", "tracked here"])
def test_store_that_cannot_be_made_is_reported_as_one_problem(tmp_path, capsys, monkeypatch, uri):
    make_study(tmp_path).config_file.write_text(f"tracker:\n  uri: {uri}\n")

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / ".mlflow.lock"))

    monkeypatch.setattr(store, "ensure_store", refuse)
    with pytest.raises(BadInput, match=r"the store cannot be made \(.*Permission denied.*\), got 'sqlite:////") as raised:
        sync_all(tmp_path, uri=store.embedded_uri(tmp_path))
    assert len(raised.value.problems) == 1
