"""What `autotune run` prints and returns when a study ends in a given way; the study itself is replaced."""

import dataclasses
import json
import sys

import pytest

import autotune.study
from autotune.cli import dry_run
from autotune.cli.main import main
from autotune.cli.run import tracking, versions
from autotune.errors import NothingWorked
from autotune.masking import Secrets
from autotune.run_dir import StudyFolder
from tests.support.studies import make_study


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """Returns a function that runs `autotune run` with a study that ends in a given way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("", encoding="utf-8")

    def run(status: str, *words: str) -> int:
        def study(_inputs, folder, listener):
            summary = make_study(tmp_path / "other").read_summary() | {"status": status, "reason": "for the test"}
            folder.write_study(dataclasses.replace(StudyFolder(tmp_path / "other" / "resnet18").read_study(), base=folder.name))
            folder.write_summary(summary)
            listener.finished(summary)
            if status == "failed":
                raise NothingWorked("baseline: for the test")
            return summary

        monkeypatch.setattr(autotune.study, "run_study", study)
        return main(["run", *words, "--", sys.executable, "train.py"])

    return run


def test_complete_study_exits_with_0_and_prints_its_verdict(ends, capsys):
    assert ends("complete") == 0
    assert "verdict  faster: 2.41x" in capsys.readouterr().out


def test_interrupted_study_exits_with_130_and_names_the_next_command(ends, capsys):
    assert ends("interrupted") == 130
    said = capsys.readouterr().err
    assert "everything measured is kept in runs/train" in said
    assert "To continue: autotune resume train" in said


def test_failed_study_exits_with_3_and_prints_the_reason(ends, capsys):
    assert ends("failed") == 3
    assert "for the test" in capsys.readouterr().err


def test_json_is_printed_for_a_failed_study_too(ends, capsys):
    assert ends("failed", "--json") == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["status"], document["reason"]) == ("failed", "for the test")


def test_json_is_the_summary_and_nothing_else(ends, capsys):
    assert ends("complete", "--json") == 0
    assert json.loads(capsys.readouterr().out)["speedup"]["verdict"] == "faster"


def test_no_tracking_process_is_started_when_tracking_is_off():
    assert tracking("none", Secrets()) is None


def test_versions_include_autotune_python_and_optuna():
    assert {"autotune", "python", "optuna"} <= set(versions())


def test_reason_of_a_failed_study_is_printed_once(cli):
    (cli.cwd / "train.py").write_text("raise SystemExit('no data here')\n", encoding="utf-8")
    ended = cli("run", "tracker.uri=none", "--", sys.executable, "train.py")
    assert ended.returncode == 3
    assert (ended.stdout + ended.stderr).count("the unchanged program could not be measured") == 1
    assert "verdict  failed\n" in ended.stdout
    assert "no data here" in ended.stderr


def test_dry_run_describes_the_study_and_leaves_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('never run')", encoding="utf-8")
    assert main(["run", "--dry-run", "study.budget.minutes=10", "loader.num_workers=2", "--", sys.executable, "train.py"]) == 0
    said = capsys.readouterr().out
    assert "budget  10 min: at least 4 min 18 s for the search, at most 5 min 42 s for the finals" in said
    assert f"baseline  {sys.executable} train.py" in said
    assert "pinned  workers 2" in said
    assert "loader.batch_size" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert main(["run", "--dry-run", "--json", "--", sys.executable, "train.py"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["baseline"] == [sys.executable, "train.py"]
    assert "precision.amp" in document["searching"]
    assert main(["run", "--dry-run", "search.warm_start=nosuch", "--", sys.executable, "train.py"]) == 2


@pytest.mark.parametrize("words", [("run",), ("run", "--dry-run")])
def test_a_grid_that_is_too_large_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys, words):
    """The baseline was measured first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(autotune.study, "run_study", lambda *_: pytest.fail("the study began"))
    domains = ["loader.batch_size=interval(1,512)", "loader.prefetch_factor=interval(1,60)", "threads.intra=choice(1,2,3,4)"]
    assert main([*words, "search.sampler=grid", *domains, "--", sys.executable, "train.py"]) == 2
    assert "search.sampler: a grid over this search space has 122,880 points" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_dry_run_promises_no_more_trials_than_were_asked_for():
    assert dry_run._plan(600.0, 300.0, ("s-1", 10.0), most=None).startswith("about 29 trials, if each takes 10 s")
    assert dry_run._plan(600.0, 300.0, ("s-1", 10.0), most=1).startswith("about 1 trial, if each takes 10 s")


def test_interrupt_before_the_study_began_leaves_no_folder(tmp_path, monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("autotune.study.loop._one_blas_thread", stop)
    assert main(["run", "tracker.uri=none", "--", sys.executable, "train.py"]) == 130
    assert "interrupted before the study began: nothing was measured" in capsys.readouterr().err
    assert not any((tmp_path / "runs").iterdir())
