"""The search benchmark continues from the studies in its file."""

import pytest

from tests.benchmarks import search

WORDS = ["--machines", "3", "--strategies", "random", "--trials", "3", "--jobs", "1"]


def test_studies_in_the_file_are_not_simulated_again(tmp_path, monkeypatch, capsys):
    file = tmp_path / "studies.jsonl"
    simulated, study_of = [], search.study_of
    monkeypatch.setattr(search, "study_of", lambda job: simulated.append(job.seed) or study_of(job))
    printed = []
    for seeds in ("1", "2", "2"):
        search.main([*WORDS, "--seeds", seeds, "--file", str(file)])
        printed.append(capsys.readouterr().out)
    assert simulated == [0, 1]
    assert printed[1] == printed[2] != printed[0]


def test_calibration_results_are_reused_from_the_file(tmp_path, monkeypatch, capsys):
    words = [*WORDS, "--trials", "12", "--seeds", "1", "--calibration", "--file", str(tmp_path / "studies.jsonl")]
    search.main(words)
    first = capsys.readouterr().out
    monkeypatch.setattr(search, "study_of", lambda job: pytest.fail("simulated again"))
    search.main(words)
    assert capsys.readouterr().out == first
    assert "90 % intervals, rate of proposals" in first
    assert "regret at most 1 % after the choosing rounds" in first


def test_machines_that_cannot_fit_the_program_are_left_out_and_named(capsys):
    no_baseline, nothing_fits = "426", "450"
    search.main([*WORDS, "--machines", f"{no_baseline},3,{nothing_fits}", "--seeds", "1"])
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if "left out" in line] == [
        "V100-transformer-426", "V100-transformer-450",
    ]  # fmt: skip
    assert "CPU-conv-3: " in printed
    assert "transformer-450: " not in printed
    with pytest.raises(SystemExit, match="no machine is left"):
        search.main(["--machines", nothing_fits])
