"""The comparison of searches: when each search reached its rates, and how the winner's rate is verified."""

import importlib.util
from pathlib import Path

import pytest

from tests.benchmarks import rivals
from tests.benchmarks.rivals import OURS, PLAIN, PYTORCH_AUTOTUNE, TPE


def found(*timeline: list[float]) -> rivals.Found:
    return {"seconds": 60.0, "timeline": list(timeline), "winner": "bf16", "command": ["true"], "num_trials": len(timeline)}


def test_climb_keeps_only_rises_of_the_best_rate() -> None:
    assert rivals.climb([(1.0, 10.0), (2.0, None), (3.0, 9.0), (4.0, 12.0)]) == [[1.0, 10.0], [4.0, 12.0]]


def test_reported_rates_are_scaled_to_the_verified_rate_of_the_winner() -> None:
    boasting = found([5.0, 100.0], [20.0, 200.0])  # its winner's verified rate is half the rate that it reported
    assert rivals.seconds_to_near(boasting, verified_per_s=100.0, best_per_s=100.0) == 20.0
    assert rivals.seconds_to_near(boasting, verified_per_s=100.0, best_per_s=50.0) == 5.0
    assert rivals.seconds_to_near(boasting, verified_per_s=100.0, best_per_s=200.0) is None
    assert rivals.seconds_to_near(found(), verified_per_s=100.0, best_per_s=100.0) is None


def test_rows_compare_verified_rates_repeat_by_repeat() -> None:
    repeats = [
        {"found": {OURS: found([9.0, 200.0]), TPE: found()}, "verified": {PLAIN: [100.0], OURS: [200.0], TPE: [160.0]}},
        {"found": {OURS: found([8.0, 100.0]), TPE: found()}, "verified": {PLAIN: [100.0], OURS: [200.0], TPE: [100.0]}},
    ]
    rows = {row[0]: row for row in rivals.rows(repeats)}
    assert rows[OURS][1:5] == ("200.0", "1.000 (1.000 to 1.000)", "100.0%", "9, 8")
    assert rows[TPE][2] == "1.581 (1.250 to 2.000)"
    assert rows[TPE][4] == "never, never"
    assert rows[PLAIN][4:] == ("", "", "", "")


def test_step_time_is_read_from_the_line_of_a_successful_rival_trial() -> None:
    line = "  [ok          ] amp_bf16 compile=reduce-overhead channels_last fused     2.33 ms\n"
    said = rivals.SAID.search(line)
    assert said
    assert said[1] == "2.33"
    assert not rivals.SAID.search("  [disqualified] amp_fp16 compile=off                              out of memory\n")


def test_missing_rival_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert rivals.missing(PYTORCH_AUTOTUNE) == f"pytorch-autotune is not installed: {rivals.INSTALL}"
    assert rivals.missing(TPE) == ""


@pytest.mark.parametrize("words", [["--only", PYTORCH_AUTOTUNE], ["--only", PYTORCH_AUTOTUNE, "--workers", "2"]])
def test_a_comparison_without_any_search_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="no search is left"):
        rivals.main(words)


def test_worker_count_is_passed_and_searched_only_if_it_is_given(tmp_path: Path) -> None:
    work = rivals.Work(folder=tmp_path, budget_s=60.0, workers=0, words=("--size", "32"))
    assert work.program[2:] == ["--size", "32", "--batch", "128", "--workers", "0"]
    assert ["--workers", "1"] in rivals.choices(work)["workers"]
    assert "workers" not in rivals.choices(rivals.Work(folder=tmp_path, budget_s=60.0))
