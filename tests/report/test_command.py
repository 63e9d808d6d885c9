"""`autotune report` on the command line."""

import html
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys

import pytest
from PIL import Image

from autotune.cli.main import main
from autotune.report import picture
from tests.support.studies import make_study


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_study(tmp_path / "runs")
    return tmp_path


def refused(capsys, *words):
    assert main(["report", *words]) == 2
    ended = capsys.readouterr()
    assert ended.out == ""
    assert "Traceback" not in ended.err
    return ended.err


def test_report_of_the_latest_study_is_written_to_its_folder(here, capsys):
    assert main(["report"]) == 0
    assert capsys.readouterr().out == "wrote runs/resnet18/report.html\n"
    assert "2.41x" in (here / "runs" / "resnet18" / "report.html").read_text()


def test_several_studies_are_compared_in_one_report(here, capsys):
    make_study(here / "runs", "other")
    assert main(["report", "resnet18", "other"]) == 0
    assert capsys.readouterr().out == "wrote runs/report.html\n"
    assert "comparison of 2 studies" in (here / "runs" / "report.html").read_text()


def test_a_copied_folder_from_another_machine_can_be_named_by_its_path(here, capsys):
    shutil.copytree(here / "runs" / "resnet18", here / "elsewhere" / "resnet18")
    assert main(["report", "resnet18", "elsewhere/resnet18", "-o", "out/both.html"]) == 0
    text = (here / "out" / "both.html").read_text()
    assert "elsewhere/resnet18" in text
    assert "runs/resnet18" in text


def test_report_is_written_into_a_given_folder(here, capsys):
    (here / "out").mkdir()
    assert main(["report", "resnet18", "-o", "out/"]) == 0
    assert capsys.readouterr().out == "wrote out/report.html\n"
    assert "2.41x" in (here / "out" / "report.html").read_text()


def test_output_dash_writes_the_report_to_standard_output(here, capsys):
    assert main(["report", "resnet18", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_json_states_path_and_size_of_the_report(here, capsys):
    assert main(["report", "resnet18", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["studies"] == ["resnet18"]
    assert os.path.getsize(said["file"]) == said["bytes"]


def test_report_to_a_closed_standard_output_is_refused(here):
    words = [sys.executable, "-m", "autotune", "report", "resnet18", "-o", "-"]
    closed = subprocess.run(["sh", "-c", f"{shlex.join(words)} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stdout) == (2, "")
    assert closed.stderr == "autotune: --output: standard output is closed, got '-'. Give -o FILE.\n"
    shown = subprocess.run(["sh", "-c", f"{shlex.join([*words[:3], 'show'])} >&-"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_missing_or_damaged_files_are_named_on_the_page_and_on_the_terminal(here, capsys):
    folder = here / "runs" / "resnet18"
    for number in range(1, 6):
        (folder / "trials" / f"{number:04d}" / "trial.json").unlink()
    (folder / "trials" / "0000" / "trial.json").write_text("{")
    (folder / "study.json").write_text("[]")
    assert main(["report", str(folder), "-o", "x.html"]) == 0
    said, page = capsys.readouterr().err, html.unescape(re.sub("<wbr>", "", (here / "x.html").read_text()))
    for line in said.splitlines():
        assert f'<p class="unread">{line.removeprefix("autotune: ")}</p>' in page
    trials, study = said.splitlines()
    assert "runs/resnet18/trials/0000/trial.json: cannot be read (Expecting property name" in trials
    assert "runs/resnet18/trials/0001/trial.json: missing; " in trials
    assert "and 3 more. It is not known when these trials ran, how long their steps took and what disturbed them." in trials
    assert "runs/resnet18/study.json: cannot be read (study record expected, got [])" in study
    assert "2.41x" in page
    assert "batch 128" in page.split('id="settings"')[1].split("</figure>")[0]  # known from the trials


def test_control_characters_in_texts_of_a_study_reach_no_terminal_and_no_page(here, capsys):
    evil = "a\u202eb\x1b[31mc\x9b2Jd"
    folder = here / "runs" / "resnet18"
    for name in ("summary.json", "study.json"):
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**document, "title": evil, "cycles": evil, "drift": evil}))
    for words in (["list"], ["show"], ["show", "--json"], ["report"], ["report", "-o", "-"], ["report", "-o", f"{evil}.html"],
                  ["report", evil], ["export"]):  # fmt: skip
        main(words)
        said = "".join(capsys.readouterr())
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", said), words
        assert said
    assert "ab[31mc2Jd" in (folder / "report.html").read_text()
    main(["show", "--json"])
    assert json.loads(capsys.readouterr().out)["title"] == evil


def test_a_picture_without_a_browser_says_how_to_get_one(here, capsys, monkeypatch):
    monkeypatch.setattr(picture, "BROWSERS", ("no-such-browser",))
    assert "apt-get install chromium" in refused(capsys, "resnet18", "--picture", "x.png")


def test_a_picture_replaces_no_file_of_the_user_without_force(here, capsys, monkeypatch):
    monkeypatch.setattr(picture, "take", lambda *_, **__: b"taken")
    (here / "mine.png").write_bytes(b"mine")
    assert "--picture: the file exists and does not look like" in refused(capsys, "resnet18", "--picture", "mine.png")
    assert (here / "mine.png").read_bytes() == b"mine"
    assert main(["report", "resnet18", "--picture", "mine.png", "--force"]) == 0
    assert (here / "mine.png").read_bytes() == b"taken"


@pytest.mark.parametrize("num_bytes", [0, 60])
def test_incomplete_picture_is_refused(here, capsys, monkeypatch, num_bytes):
    """A browser leaves such a picture on a full disk."""
    whole, browser = here / "whole.png", here / "browser"
    Image.new("RGB", (1440, 1100)).save(whole)
    browser.write_text(
        f'#!/bin/sh\nfor word; do case "$word" in --screenshot=*) head -c {num_bytes} {whole} >"${{word#*=}}";; esac; done\n'
    )
    browser.chmod(0o755)
    monkeypatch.setattr(picture, "BROWSERS", (str(browser),))
    assert f"--picture: {browser} made no whole picture, got 'x.png'." in refused(capsys, "resnet18", "--picture", "x.png")
    assert not (here / "x.png").exists()


def test_report_is_opened_in_a_browser(here, capsys, monkeypatch):
    opened = here / "opened"
    browser = here / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("webbrowser._browsers", {})
    monkeypatch.setattr("webbrowser._tryorder", None)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    assert main(["report", "resnet18", "--open"]) == 0
    assert opened.read_text().strip() == (here / "runs" / "resnet18" / "report.html").as_uri()
    assert capsys.readouterr().err == ""


def test_report_replaces_no_record_of_a_study_even_through_a_link(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_study(tmp_path / "runs")
    before = made.summary_file.read_bytes()
    (tmp_path / "link.html").symlink_to(made.summary_file)
    for file in ("link.html", str(made.best_file), str(made.path / "trials" / "0000" / "trial.json"), "runs/mlflow.db"):
        assert main(["report", made.name, "-o", file]) == 2
        assert "a record of" in capsys.readouterr().err
    assert made.summary_file.read_bytes() == before


def test_undecodable_bytes_are_written_in_an_escaped_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_study(tmp_path / "runs")
    summary = json.loads(made.summary_file.read_text())
    made.summary_file.write_text(json.dumps({**summary, "title": "caf\udcff"}))
    (tmp_path / "out.html").write_text("old")
    assert main(["report", made.name, "-o", "out.html", "--force"]) == 0
    assert "caf\\udcff" in (tmp_path / "out.html").read_text()
