"""What `autotune run` makes of a study's end; the study itself is replaced, it has tests of its own."""

import json
import sys

import pytest

import autotune.study
from autotune.cli.main import main
from autotune.cli.run import tracking, versions
from autotune.masking import Secrets
from autotune.testing.studies import make_study


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """Returns a function that runs `autotune run` with a study that ends in a given way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("", encoding="utf-8")

    def run(status: str, *words: str) -> int:
        def study(_plan, _folder, listener):
            summary = make_study(tmp_path / "other").read_summary() | {"status": status, "reason": "for the test"}
            listener.finished(summary)
            return summary

        monkeypatch.setattr(autotune.study, "run_study", study)
        return main(["run", *words, "--", sys.executable, "train.py"])

    return run


def test_a_complete_study_is_0_with_its_verdict(ends, capsys):
    assert ends("complete") == 0
    assert "verdict  faster: 2.41x" in capsys.readouterr().out


def test_an_interrupted_study_is_130_and_names_the_next_command(ends, capsys):
    assert ends("interrupted") == 130
    said = capsys.readouterr().err
    assert "everything measured is kept in runs/train" in said
    assert "Next: autotune export train" in said


def test_a_study_in_which_nothing_worked_is_3_with_the_reason(ends, capsys):
    assert ends("failed") == 3
    assert "for the test" in capsys.readouterr().err


def test_json_is_the_summary_and_nothing_else(ends, capsys):
    assert ends("complete", "--json") == 0
    assert json.loads(capsys.readouterr().out)["speedup"]["verdict"] == "faster"


def test_no_mirror_is_started_when_nothing_is_to_be_tracked():
    assert tracking("none", Secrets()) is None


def test_versions_name_what_results_depend_on():
    assert {"autotune", "python", "optuna"} <= set(versions())
