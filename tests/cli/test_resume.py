"""What `autotune resume` asks a cluster for, and which options reach the study; the study itself is replaced."""

import dataclasses
from pathlib import Path

import pytest

from autotune.cli.main import main
from tests.support.studies import make_study


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Returns a function that makes an interrupted study; `about` are values of its record."""
    monkeypatch.chdir(tmp_path)

    def make(**about):
        folder = make_study(Path("runs"), status="interrupted")
        folder.write_study(dataclasses.replace(folder.read_study(), cwd=str(tmp_path), identity={"a": 1}, **about))

    return make


@pytest.mark.parametrize(
    ("search_ended", "words", "is_alone"),
    [("no improvement is expected", [], True), ("", [], False), ("the budget is used", ["study.budget.minutes=900"], False)],
)
def test_a_study_asks_for_one_slot_once_its_search_is_over(interrupted, monkeypatch, search_ended, words, is_alone):
    interrupted(search_ended=search_ended)
    asked = []
    monkeypatch.setattr("autotune.cli.resume.inputs_of", lambda *_, is_alone: asked.append(is_alone))
    monkeypatch.setattr("autotune.cli.resume.carry_out", lambda *_, **__: 0)
    assert main(["resume", "resnet18", *words]) == 0
    assert asked == [is_alone]


def test_a_recording_is_continued_quietly_if_asked_to(interrupted, monkeypatch):
    interrupted(recording={"configurations": 4, "repeats": 1})
    asked = []
    monkeypatch.setattr("autotune.cli.record._inputs", lambda *_: None)
    monkeypatch.setattr("autotune.cli.record._write", lambda *_, **__: None)
    monkeypatch.setattr("autotune.cli.record.carry_out", lambda *_, **options: asked.append(options["is_quiet"]) or 0)
    assert main(["resume", "resnet18", "--quiet"]) == 0
    assert asked == [True]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_number_of_trials_that_are_used_up_is_refused(interrupted, capsys, plus):
    interrupted()
    assert main(["resume", "resnet18", f"{plus}study.budget.trials=1"]) == 2
    assert "study.budget.trials: 5 trials are already used, got 1" in capsys.readouterr().err
