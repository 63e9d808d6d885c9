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


def test_noise_that_did_not_end_and_data_read_from_memory_are_said_with_the_verdict(tmp_path):
    folder = make_study(tmp_path / "runs")
    quiet = folder.read_summary()
    assert not any(line.startswith(("beside", "disk")) for line in lines(quiet, folder.path))
    beside = {"since_trial": 4, "level": {"cpu": 1.2}, "words": "other programs used 1.2 of 2 cores"}
    said = lines({**quiet, "disturbed_by": beside, "page_cache": "the data set does not fit"}, folder.path)
    assert any(line.startswith("beside  other programs used 1.2 of 2 cores from trial 4 on") for line in said)
    assert "disk  the data set does not fit" in said
