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


def test_verdict_says_how_close_the_losses_are_and_what_is_out(tmp_path):
    folder = make_study(tmp_path / "runs")
    out = {"knobs": {"precision.amp": "bf16"}, "reason": "loss 3.1 against 1.2 after 40 steps", "trial": 9}
    found = {"verdict": "passed", "text": "within 0.4 % of the baseline's loss over 40 steps", "failed": [out], "training": {}}
    said = lines({**folder.read_summary(), "parity": found}, folder.path)
    assert "parity  loss within 0.4 % of the baseline's loss over 40 steps" in said
    assert "out  bf16: loss 3.1 against 1.2 after 40 steps" in said


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
