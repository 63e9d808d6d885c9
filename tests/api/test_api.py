"""`autotune.run` and `autotune.Study`: whole studies of a stub program, in this process and in a notebook."""

import contextlib
import io
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import autotune
from autotune.api import Speedup
from autotune.errors import BadInput
from autotune.records import Kind
from tests.faults.quick_study import OPTIONS, PROGRAM
from tests.support.stub_programs import PRELUDE
from tests.support.studies import make_study

SMALL = (*OPTIONS, "explain.auto=false", "search.warm_start=off", "search_space=space.yaml")


COMMAND = [sys.executable, "-S", "train.py", "0.1"]


def make_program(folder):
    """Makes a program that is 1.5 times as fast with bf16, for COMMAND."""
    (folder / "train.py").write_text(f"{PRELUDE}\n{PROGRAM}")
    (folder / "space.yaml").write_text("precision.amp: ['off', 'bf16']\n")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Returns the command of a program; makes its folder the working directory."""
    monkeypatch.chdir(tmp_path)
    make_program(tmp_path)
    return COMMAND


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a program, its finished study, the calls of `on_trial`, and what was printed. Tests must not change it."""
    folder, called = tmp_path_factory.mktemp("finished"), []
    make_program(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        study = autotune.run(*SMALL, command=COMMAND, on_trial=lambda study, trial: called.append((study.name, trial.number)))
    return folder, study, called, printed.getvalue()


@pytest.fixture
def study(finished, monkeypatch):
    """The finished study; makes the folder of its program the working directory."""
    folder, study, _, _ = finished
    monkeypatch.chdir(folder)
    return study


def test_study_run_from_python_returns_best_knobs_speedup_and_effects(study):
    assert study.status == "complete"
    assert study.best == {"precision.amp": "bf16"}
    assert study.speedup.verdict == "faster"
    assert study.speedup.low <= study.speedup.ratio <= study.speedup.high
    assert study.speedup.ratio == pytest.approx(1.5, rel=0.05)
    (effect,) = study.effects
    assert (effect["knob"], effect["to"]) == ("precision.amp", "bf16")
    assert "changed  precision.amp: off -> bf16" in study.verdict
    assert repr(study).startswith("Study('s', 'faster: 1.5")


def test_trials_are_available_as_records_and_as_a_table(study):
    assert [trial.number for trial in study.trials] == list(range(len(study.trials)))
    assert study.trials[0].kind is Kind.baseline
    table = study.to_pandas()
    assert list(table.index) == [trial.number for trial in study.trials]
    assert table.loc[0, "precision.amp"] == "off"
    assert table["rate"].max() == pytest.approx(450, rel=0.02)
    assert set(table["outcome"]) == {"ok"}


@pytest.mark.thorough
def test_winner_is_exported_as_on_the_command_line(study):
    assert 'amp: "bf16"' in study.export()
    assert "autocast" in study.export("python")
    with pytest.raises(BadInput, match="no such tier, got 'everything'"):
        study.export(tier="everything")


@pytest.mark.thorough
def test_study_is_found_by_name_by_folder_and_by_runs_folder(study):
    assert autotune.Study("s").path == study.path
    assert autotune.Study("runs/s").path == study.path
    assert autotune.Study("s", runs_dir=Path.cwd() / "runs").path.resolve() == study.path.resolve()
    with pytest.raises(BadInput, match="no such study"):
        autotune.Study("resnet")


def test_on_trial_is_called_after_every_trial_and_lines_are_printed(finished, study):
    _, _, called, printed = finished
    assert called == [("s", trial.number) for trial in study.trials]
    assert "0000  baseline starts" in printed
    assert "verdict  faster: 1.5" in printed


def test_exception_in_on_trial_ends_a_quiet_study_and_loses_no_trial(command, capsys):
    called = []

    def stop(study, trial):
        called.append(trial.number)
        if trial.kind is Kind.search:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        autotune.run(*SMALL, command=command, on_trial=stop, is_quiet=True)
    assert capsys.readouterr().out == ""
    study = autotune.Study("s")
    assert called == [trial["number"] for trial in study.summary["trials"]] == [0, 1]
    assert study.status == "failed"
    assert "enough" in study.summary["reason"]
    assert [trial.kind for trial in study.trials] == [Kind.baseline, Kind.search]


def test_bad_request_raises_bad_input_and_leaves_no_folder(command, tmp_path):
    with pytest.raises(BadInput, match=r"study\.budget\.minute"):
        autotune.run("study.budget.minute=1", command=command)
    assert not (tmp_path / "runs").exists()


def test_command_as_one_text_is_refused_and_the_list_to_give_is_named(command):
    """Its letters were taken for the arguments: "no such program, got 'p'"."""
    with pytest.raises(BadInput, match=r"got 'python train\.py'\. Give command=\['python', 'train\.py'\]"):
        autotune.run(command="python train.py")
    with pytest.raises(BadInput, match=r"study\.budget\.minute"):
        autotune.run("study.budget.minute=1", command=[*command[:-2], Path(command[-2]), command[-1]])


@pytest.mark.thorough
def test_interrupt_keeps_the_measured_trials_and_says_how_to_continue(command, tmp_path):
    source = f"""
        import autotune
        try:
            autotune.run(*{SMALL!r}, command={[*command[:-1], "1.5"]!r})
        except autotune.errors.Interrupted as error:
            print(error)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("0001  search starts"):
            break
    time.sleep(0.3)
    process.send_signal(2)
    printed = process.communicate(timeout=60)[0]
    assert "To continue: autotune resume s" in printed
    assert autotune.Study("s").trials[0].kind is Kind.baseline


def test_study_without_trials_gives_an_empty_table(tmp_path):
    folder = make_study(tmp_path)
    for file in folder.trial_files("trial.json"):
        file.unlink()
    table = autotune.Study(folder.path).to_pandas()
    assert len(table) == 0
    assert {"rate", "outcome", "seconds"} <= set(table.columns)


def test_study_is_still_found_after_a_change_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_study(Path("runs"))
    found = autotune.Study(folder.name), autotune.Study(folder.path), autotune.Study._of(folder)
    monkeypatch.chdir("/")
    for study in found:
        assert study.status == "complete"
        assert study.path == tmp_path / "runs" / "resnet18"


def test_unreadable_trial_and_unwritable_report_raise_bad_input(tmp_path):
    study = autotune.Study(make_study(tmp_path).path)
    study.path.joinpath("report.html").mkdir()
    with pytest.raises(BadInput, match=r"its report cannot be written, got '.*report\.html'"):
        study.report()
    study.path.joinpath("trials", "0003", "trial.json").write_text("{")
    with pytest.raises(BadInput, match=r"a trial cannot be read, got 'resnet18' \(.*0003/trial\.json"):
        study.to_pandas()


def test_report_masks_secrets_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    folder = make_study(tmp_path)
    folder.write_summary({**folder.read_summary(), "title": "train.py hunter2hunter2"})
    page = autotune.Study(folder.path).report().path.read_text()
    assert "hunter2" not in page
    assert "train.py ***" in page


@pytest.mark.thorough
def test_running_study_has_no_speedup_yet(command, tmp_path):
    seen = []
    autotune.run(
        *SMALL, command=command, on_trial=lambda study, trial: seen.append((study.speedup, repr(study))), is_quiet=True
    )
    assert seen[0] == (None, "Study('s', 'running')")
    assert isinstance(autotune.Study("s").speedup, Speedup)
