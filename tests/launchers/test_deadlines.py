"""Time limits of a trial: which phase they count for, and whether a trial at its limit still makes steps."""

import json

import pytest

from autotune.launchers.base import Deadlines
from autotune.launchers.hangs import MOVING_S, is_moving, passed_limit
from autotune.launchers.progress_file import ProgressFile

LIMITS = Deadlines(start_s=10, compile_s=20, step_s=5, total_s=100.46)
PAST_S = -1000.0  # before any real monotonic time, so that no line lies in the future


@pytest.fixture
def progress(tmp_path):
    file = tmp_path / "progress.jsonl"

    def after(*lines):
        with file.open("a") as out:
            out.writelines(json.dumps({"time_s": PAST_S + time_s, "phase": phase, "step": 1}) + "\n" for time_s, phase in lines)
        found = ProgressFile(file)
        found.read()
        return found

    return after


@pytest.mark.parametrize(
    ("lines", "last_good_s", "limit"),
    [
        ([], 10, "start: no training step began (last phase: spawn) within 10 s"),
        ([(1, "import"), (9, "first_batch")], 10, "start:"),  # several phases share one limit
        ([(9, "compile"), (15, "compile")], 29, "compile:"),  # counts from the first line of the phase
        ([(9, "compile"), (20, "warmup"), (24, "warmup")], 29, "step:"),
        ([(9, "compile"), (20, "warmup"), (40, "compile")], 60, "compile:"),  # entered again when the window restarted
        ([(9, "warmup"), (96, "steady")], 100.4, "total: the trial was not over within 100.5 s"),
    ],
)
def test_each_phase_has_its_own_limit_and_start_time(progress, lines, last_good_s, limit):
    seen = progress(*lines)
    assert passed_limit(LIMITS, seen, started_s=PAST_S, now_s=PAST_S + last_good_s) == ""
    assert passed_limit(LIMITS, seen, started_s=PAST_S, now_s=PAST_S + last_good_s + 0.1).startswith(limit)


def test_trial_that_still_makes_steps_at_the_total_limit_is_not_reported_as_hanging(progress):
    seen, now_s = progress((9, "warmup"), (100, "steady")), PAST_S + 100 + MOVING_S
    assert is_moving(seen, now_s=now_s)
    assert passed_limit(LIMITS, seen, started_s=PAST_S, now_s=now_s).endswith("(last phase: steady, still making steps)")
    assert not is_moving(seen, now_s=now_s + 0.1)
    assert not is_moving(progress((100.5, "compile")), now_s=now_s)


@pytest.mark.parametrize("time_s", ["1e300", "NaN", "Infinity"])
def test_impossible_time_in_the_progress_does_not_postpone_a_limit(tmp_path, time_s):
    file = tmp_path / "progress.jsonl"
    file.write_text(f'{{"time_s": {time_s}, "phase": "steady"}}\n')
    progress = ProgressFile(file)
    progress.read()
    assert progress.phase == "steady"
    assert passed_limit(LIMITS, progress, started_s=progress.changed_s, now_s=progress.changed_s + 6).startswith("step:")
