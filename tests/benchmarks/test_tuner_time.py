"""The benchmarks of the tuner's own time and of trials in parallel print their tables at small sizes."""

import pytest

from tests.benchmarks import parallel_tables, proposals, scale
from tests.benchmarks.commands import ROOT


@pytest.mark.parametrize(("sampler", "is_profiled"), [("random", False), ("rates", True)])
def test_small_study_gives_a_row_of_the_table(sampler, is_profiled):
    row, *profile = scale.run(6, 2, sampler, "gpu", is_profiled=is_profiled, is_tracked=False).splitlines()
    assert row.split()[:4] == ["gpu", sampler, "6", "2"]  # six trials of the search were recorded
    assert any("ask" in line for line in profile) == is_profiled


def test_a_proposal_is_timed_after_each_number_of_trials(monkeypatch, capsys):
    monkeypatch.setattr(proposals, "NUM_TIMED", 1)
    proposals.main(["--trials", "8,12", "--running", "1"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in rows] == ["8", "12"]
    assert all(int(line.split()[2].replace(",", "")) > 1000 for line in rows)  # function calls: the sampler fits a model


def test_trials_in_parallel_are_compared_on_a_recorded_table(capsys):
    [recorded] = (ROOT / "tests/data/replay").glob("mlp_*.jsonl.gz")
    parallel_tables.main([str(recorded), "--seeds", "1", "--trials", "3", "--slots", "1,2"])
    printed = capsys.readouterr().out
    assert [line.split("|")[2].strip() for line in printed.splitlines() if "| mlp" in line] == ["1", "2", "2"]
