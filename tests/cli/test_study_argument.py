"""Every command accepts the same words for a study on its command line."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from autotune.api import Study
from autotune.cli.main import main
from autotune.config.compose import compose
from autotune.errors import BadInput
from autotune.run_dir import StudyFolder
from autotune.studies import call, find, studies
from autotune.trackers.sync import incomplete
from tests.support.studies import make_study

# Name -> the words of a command, and a part of its output that shows which study it used. The folder in which the study ran
# is gone.
COMMANDS = {
    "show": (["show"], "files        {folder}"),
    "trial": (["show", "--trial", "5"], "everything else is in {folder}/trials/0005"),
    "why": (["show", "--why"], "--why: this study was not explained yet, got '{name}'"),
    "report": (["report", "-o", "-"], "{name}, complete, in {folder}"),
    "export": (["export"], 'study: "{name}"'),
    "explain": (["explain"], "cwd: the folder that the program ran in does not exist any more, got '/gone/{name}'"),
    "resume": (["resume"], "To continue, give it a larger budget: autotune resume {call} "),
    "sync": (["sync"], "{name}: nothing is tracked"),
    "apply": (["apply"], "COMMAND: missing, and {folder}/best.yaml was made for your own program"),
    "verify": (["verify"], "provenance: no claim to verify in '{folder}/best.yaml'"),
}
PLACES = ["runs/first", "b/second", "./b/second/", "b/second/report.html", "b/second/trials/0001/stdout.log"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Makes two studies, one in the runs folder and one elsewhere, each in its own working directory."""
    monkeypatch.chdir(tmp_path)
    for runs, name in (("runs", "first"), ("b", "second")):
        folder = make_study(Path(runs), name)
        folder.write_study(dataclasses.replace(folder.read_study(), cwd=f"/gone/{name}", identity={"a": 1}))
        folder.config_file.write_text("tracker:\n  uri: none\n", encoding="utf-8")
        folder.report_file.write_text("", encoding="utf-8")
    return tmp_path


def said(capsys, *words):
    """Runs a command and returns its output as one line."""
    main(list(words))
    ended = capsys.readouterr()
    assert "Traceback" not in ended.err
    return " ".join(" ".join(line.strip("\u2502 ") for line in (ended.out + ended.err).splitlines()).split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", ["first", *PLACES])
def test_every_command_accepts_a_study_name_its_folder_or_a_file_in_it(here, capsys, command, given):
    words, expected = COMMANDS[command]
    name = "second" if "second" in given else "first"
    folder = StudyFolder(Path("b/second" if name == "second" else "runs/first"))
    shown = expected.format(folder=folder.path, name=name, call=call(folder))
    assert " ".join(shown.split()) in said(capsys, words[0], given, *words[1:])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("frist", "STUDY: no such study in 'runs', got 'frist'. Did you mean 'first'? There are: first."),
        ("b/secnd", "STUDY: no such study, got 'b/secnd'. Did you mean 'second'? There are: second."),
        ("b", "STUDY: a folder that is not a study, got 'b'. It contains studies, such as 'b/second'."),
        ("empty/", "STUDY: a folder that is not a study, got 'empty/'. Give a study's name or its folder."),
        ("../nowhere", "STUDY: no such study, got '../nowhere'. There is none yet."),
        ("", "STUDY: no such study in 'runs', got ''."),
    ],
)
def test_every_command_gives_the_same_message_if_there_is_no_study(here, capsys, command, given, expected):
    (here / "empty").mkdir()
    words, _ = COMMANDS[command]
    assert main([words[0], given, *words[1:]]) == 2
    assert expected in capsys.readouterr().err


def test_copied_study_is_found_by_its_new_name(here, capsys):
    make_study(Path("runs"), "a")
    shutil.copytree("runs/a", "runs/0copy")
    assert find(Path("runs"), "a").path == Path("runs/a")
    assert json.loads(_json(capsys, "0copy"))["study"] == "0copy"
    assert said(capsys, "show", "0copy").startswith("0copy ")
    assert 'study: "0copy"' in said(capsys, "export", "0copy")
    assert call(StudyFolder(Path("runs/0copy"))) == "0copy"
    assert Study("0copy").name == "0copy"
    assert {folder.read_study().base for folder in studies(Path("runs"))} == {"first", "a", "0copy"}


def _json(capsys, name):
    assert main(["show", name, "--json"]) == 0
    return capsys.readouterr().out


def test_renamed_study_is_no_longer_found_by_its_former_name(here):
    make_study(Path("runs"), "a")
    later = make_study(Path("runs"), "a")
    os.rename(later.path, "runs/good")
    assert find(Path("runs"), "a").path == Path("runs/a")
    assert find(Path("runs"), "good").path == Path("runs/good")


def test_message_says_which_of_two_studies_with_one_name_is_used(here, capsys):
    for _ in range(2):
        make_study(Path("runs"), "a")
    assert main(["export", "a"]) == 0
    assert capsys.readouterr().err == "autotune: a means runs/a-2, the latest of that name; runs/a is another study\n"
    assert main(["export", "runs/a"]) == 0
    assert capsys.readouterr().err == ""
    make_study(Path(), "first")
    assert main(["export", "first"]) == 0
    assert capsys.readouterr().err == "autotune: first means runs/first, the latest of that name; ./first is another study\n"


def test_sync_command_identifies_each_of_two_studies_with_one_name(here):
    first, later = (make_study(Path("runs"), "a") for _ in range(2))
    assert "`autotune sync runs/a` completes it" in incomplete(first, "down")
    assert "`autotune sync a-2` completes it" in incomplete(later, "down")


def test_study_is_found_from_inside_its_runs_folder_and_its_own_folder(here, capsys, monkeypatch):
    monkeypatch.chdir(here / "runs")
    assert "files first" in said(capsys, "show", "first")
    monkeypatch.chdir(here / "runs" / "first")
    for word in (".", "report.html"):
        folded = said(capsys, "show", word).replace(" ", "")  # long paths are wrapped
        assert f"files{here}/runs/first" in folded
        assert "\u2026" not in folded


def test_study_folder_is_refused_as_the_runs_folder(here, capsys):
    assert main(["list", "--runs-dir", "b/second"]) == 2
    assert f"got 'b/second'. Give --runs-dir {here}/b." in capsys.readouterr().err


def test_tilde_in_the_runs_folder_means_the_home_folder_for_every_command(here, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert main(["list", "--runs-dir=~/b", "--json"]) == 0
    assert [row["study"] for row in json.loads(capsys.readouterr().out)] == ["second"]
    assert compose(["model=mlp"], command=None, runs_dir="~/b").config.runs_dir == str(here / "b")


def test_file_outside_any_study_is_refused(here):
    (here / "train.py").write_text("")
    with pytest.raises(BadInput, match=r"STUDY: a file outside any study, got 'train\.py'"):
        find(Path("runs"), "train.py")


@pytest.mark.parametrize("command", ["apply", "verify"])
def test_apply_and_verify_use_best_yaml_when_given_the_configuration_file(here, capsys, command):
    words, expected = COMMANDS[command]
    shown = expected.format(folder="b/second", name="second", call="")
    assert shown in said(capsys, *words, "b/second/config.yaml")
