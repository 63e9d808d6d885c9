"""The verdict in a line, for every way a study can stand."""

import pytest

from autotune.cli.verdict import headline, lines, next_commands
from autotune.testing.studies import make_study

FASTER = {"ratio": 2.41, "ci": [2.36, 2.46], "verdict": "faster", "reason": ""}
UNPROVEN = {"ratio": 1.5, "ci": None, "verdict": "ambiguous", "reason": "the finals have not run: the search's own numbers"}
NOTHING = {"ratio": None, "ci": None, "verdict": "ambiguous", "reason": "nothing but the baseline was measured"}
SLOWER = {"ratio": None, "ci": None, "verdict": "same", "reason": "no configuration that trained came near the baseline"}


@pytest.mark.parametrize(
    ("status", "speedup", "said"),
    [
        ("complete", FASTER, "faster: 2.41x [2.36, 2.46]"),
        ("interrupted", FASTER, "faster: 2.41x [2.36, 2.46] (interrupted)"),
        ("interrupted", UNPROVEN, "ambiguous: 1.50x (interrupted)"),
        ("complete", NOTHING, "no verdict: nothing but the baseline was measured"),
        ("complete", SLOWER, "same: no configuration that trained came near the baseline"),
        ("interrupted", None, "interrupted: stopped by the user"),
        ("running", None, "running"),
        ("failed", None, "failed: stopped by the user"),
    ],
)
def test_headline_claims_a_ratio_only_where_something_was_compared(status, speedup, said):
    reason = "" if status == "running" else "stopped by the user"
    assert headline({"status": status, "reason": reason, "speedup": speedup}) == said


def test_no_line_of_a_study_that_compared_nothing_speaks_of_a_ratio(tmp_path):
    folder = make_study(tmp_path / "runs")
    summary = {**folder.read_summary(), "status": "interrupted", "reason": "stopped by the user", "speedup": None}
    assert not any("1.00x" in line for line in lines(summary, folder.path))


def test_next_command_of_an_interrupted_study_is_to_resume_that_very_one(tmp_path):
    first = make_study(tmp_path / "runs", status="interrupted")
    make_study(tmp_path / "runs")
    commands = next_commands(first.read_summary(), first.path)
    assert commands[0] == f"autotune resume {first.path} --runs-dir {tmp_path / 'runs'}"
    assert not any(command.startswith("autotune export") for command in commands), "it has no winner"


@pytest.mark.parametrize(
    ("objective", "verdict", "said"),
    [
        ("throughput", "faster", "faster: 1.31x [1.28, 1.34]"),
        ("time_for_samples", "faster", "faster: 1.31x [1.28, 1.34] less time for 1,000,000 samples"),
        ("energy_per_sample", "faster", "better: 1.31x [1.28, 1.34] less energy per sample"),
        ("energy_per_sample", "ambiguous", "ambiguous: 1.31x [1.28, 1.34] less energy per sample"),
        (["cost_per_epoch", "throughput"], "faster", "cheaper: 1.31x [1.28, 1.34] lower cost per epoch"),
    ],
)
def test_headline_speaks_of_the_objective(objective, verdict, said):
    speedup = {"ratio": 1.31, "ci": [1.28, 1.34], "verdict": verdict, "reason": ""}
    summary = {"status": "complete", "objective": objective, "terms": {"samples": 1_000_000}, "speedup": speedup}
    assert headline(summary) == said


def test_plain_verdict_gives_the_objectives_value_break_even_and_front(tmp_path):
    folder = make_study(tmp_path / "runs")
    summary = folder.read_summary()
    summary |= {"objective": ["time_for_samples", "throughput"], "terms": {"samples": 1_000_000}}
    summary["best"] |= {"objectives": {"time_for_samples": 25_000.0}, "objectives_ci": {"time_for_samples": [24_900, 25_100]}}
    summary["break_even"] = {"samples": 76_800.0, "steps": 1200.0, "seconds": 126.0, "dearer_s": 38.0, "compile_s": 38.0}
    summary["front"] = [{"trial": 5, "objectives": {"time_for_samples": 25_000.0, "throughput": 40.6}, "overrides": {},
                         "measured_in": "finals"}]  # fmt: skip
    said = lines(summary, folder.path)
    assert "best  6 h 56 min at 40.6 samples/s [6 h 55 min, 6 h 58 min] trial 5" in said
    assert "note  compilation pays after 1,200 steps (2 min 06 s): 38 s more before it trains, nothing compiled before" in said
    assert "front  trial 5: 6 h 56 min, 40.6 samples/s  as it is (finals)" in said
