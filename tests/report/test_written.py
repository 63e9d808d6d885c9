"""Every study writes a report, however it ends. A failure to write one does not fail the study."""

import functools
import re

import pytest

from autotune.errors import NothingWorked
from autotune.study import Wanted, explain_study, resume_study
from tests.report import made
from tests.support.fake_launcher import Failure

CRASH = Failure(error={"type": "ValueError", "message": "no such file", "traceback": "Traceback: no such file"})


kept = functools.partial(made.bench, is_kept=True)


def report_of(bench) -> str:
    return bench.folder.report_file.read_text(encoding="utf-8")


def test_complete_study_leaves_a_private_report(tmp_path):
    bench = kept(tmp_path, minutes=4)
    summary = bench.run()
    assert f"faster: {summary['speedup']['ratio']:.2f}x" in report_of(bench)
    assert bench.folder.report_file.stat().st_mode & 0o077 == 0


def test_interrupted_study_leaves_a_report_and_resuming_replaces_it(tmp_path):
    def interrupted(trial, knobs):
        return Failure(raises=KeyboardInterrupt) if trial == 3 else None

    bench = kept(tmp_path, of=made.surface(failures=interrupted), minutes=3)
    assert bench.run()["status"] == "interrupted"
    assert "autotune resume" in report_of(bench)
    bench.surface.failures = lambda trial, knobs: None
    assert resume_study(bench.inputs, bench.folder, bench.listener)["status"] == "complete"
    assert "autotune resume" not in report_of(bench)


def test_failed_study_leaves_a_report_with_the_end_of_the_log(tmp_path):
    bench = kept(tmp_path, of=made.surface(failures=lambda trial, knobs: CRASH))
    with pytest.raises(NothingWorked):
        bench.run()
    assert "failed: baseline: the unchanged program could not be measured" in report_of(bench)
    assert "no such file" in report_of(bench)


@pytest.mark.thorough
def test_explaining_a_study_writes_its_report_again(tmp_path):
    bench = kept(tmp_path)
    bench.run()
    assert "Python in the step" not in report_of(bench)
    bench.inputs.config.study.budget.minutes = None
    explain_study(bench.inputs, bench.folder, bench.listener, Wanted(passes=("lines",)))
    assert "Python in the step" in report_of(bench)


def test_unwritable_report_gives_one_note(tmp_path):
    bench = kept(tmp_path, minutes=2)
    bench.folder.report_file.mkdir()
    assert bench.run()["status"] == "complete"
    notes = [note for note in bench.listener.named("notice") if "report" in str(note)]
    assert len(notes) == 1
    assert re.search(r"`autotune report s( --runs-dir \S+)?` makes it", str(notes[0]))


def test_error_while_the_report_is_made_gives_a_note(tmp_path, monkeypatch):
    def broken(_):
        raise RuntimeError("the moon is full")

    monkeypatch.setattr("autotune.report.page.page", broken)
    bench = kept(tmp_path, minutes=2)
    assert bench.run()["status"] == "complete"
    assert any("No report was written (the moon is full)" in str(note) for note in bench.listener.named("notice"))
