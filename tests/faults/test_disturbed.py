"""Other programs use the machine while a trial is measured: real processes on the cores of a real study."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from autotune.records import Outcome
from tests.faults import trial_studies
from tests.faults.quick_study import QuickStudy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.thorough

# Measures its own real rate. The setting with fewer passes per step is by far the fastest. The finals have short windows.
PROGRAM = """
passes, seconds = int(os.environ.get("PASSES", "3")), spec["rules"]["min_s"]
rates = []
progress("steady", 5)
for _ in range(8):
    begun, steps = time.monotonic(), 0
    while time.monotonic() - begun < seconds / 8:
        for _ in range(10_000 * passes):
            pass
        steps += 1
    rates.append(steps / (time.monotonic() - begun))
rate = sum(rates) / len(rates)
window = {"steps": 80, "seconds": seconds, "samples": rate * seconds, "rate_per_s": rate, "block_rates_per_s": rates,
          "half_width_frac": 0.01, "is_steady": True, "reason": ""}
result(window=window, throughput_per_s=rate, unit="samples", target=[], observed={}, phases_s={"spawn": 0.1, "steady": seconds},
       facts={"torch": "2.14.1", "device": "cpu"})
"""
HOG = "while True: pass"
OPTIONS = ("search_space=space.yaml", "search.sampler=grid", "study.budget.minutes=0.5", "measure.screening.min_s=1.8",
           "measure.finals.min_s=0.3")  # fmt: skip
SPACE = {"env.PASSES": ["2", "4"]}
PLANTED = {"env.PASSES": "2"}


class Hogs:
    """Enough busy processes to leave a trial no free core. Messages can name their script."""

    def __init__(self, place):
        self._script, self._running = place / "hog.py", []
        self._script.write_text(HOG)

    def start(self):
        number = 2 * len(os.sched_getaffinity(0))
        # One session for each: Linux divides the cores by session, so a single session would leave the trial a free core.
        command = [sys.executable, "-S", str(self._script)]
        self._running = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]

    def end(self):
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def hogs(tmp_path):
    hogs = Hogs(tmp_path)
    yield hogs
    hogs.end()


def hog_trial(study_folder, process, hogs, changed, *, seconds):
    """Starts the hogs while the trial with these changes is measured, and ends them after `seconds`."""
    deadline = time.monotonic() + 120
    while not (found := steady_trial(study_folder, changed)):
        assert process.poll() is None, "the study ended before the trial came"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hogs.start()
    time.sleep(seconds)
    hogs.end()
    return found


def steady_trial(study_folder, changed):
    """Returns the folder of the trial with these changes if it has reached its window, else None."""
    for asked in study_folder.glob("trials/*/asked.json"):
        with contextlib.suppress(ValueError, OSError):
            progress = (asked.parent / "progress.jsonl").read_text()
            if json.loads(asked.read_text())["changed"] == changed and '"steady"' in progress:
                return asked.parent
    return None


def was_disturbed(record):
    earlier = record["evidence"].get("earlier_attempt", {})
    return record["outcome"] == "disturbed" or earlier.get("outcome") == "disturbed"


def test_a_busy_program_makes_the_trial_disturbed_but_keeps_the_winner(tmp_path, hogs):
    study = QuickStudy(tmp_path, program=PROGRAM)
    (tmp_path / "space.yaml").write_text(json.dumps(SPACE))
    process = study.start(*OPTIONS)
    folder = hog_trial(study.folder.path, process, hogs, PLANTED, seconds=2.4)
    out, err = process.communicate(timeout=240)  # the tuner gets little time, too
    assert process.returncode == 0, out + err
    shown = study.shown()
    assert shown["best"]["overrides"] == PLANTED
    if shown["disturbed_by"]:
        pytest.skip(f"others load this machine all the time: {shown['disturbed_by']['words']}")
    record = json.loads((folder / "trial.json").read_text())
    assert was_disturbed(record), record
    reason = record["evidence"].get("earlier_attempt", record)["reason"]
    assert "other programs used" in reason
    assert "hog.py, pid" in reason
    assert "Waiting for a quiet machine" in out


@pytest.mark.thorough
def test_a_busy_program_that_never_ends_is_reported_once_and_the_study_continues(tmp_path, hogs):
    study = QuickStudy(tmp_path, program=PROGRAM)
    (tmp_path / "space.yaml").write_text(json.dumps(SPACE))
    hogs.start()
    process = study.start(*OPTIONS)
    out, err = process.communicate(timeout=240)  # the tuner gets little time, too
    assert process.returncode == 0, out + err
    shown = study.shown()
    assert out.count("does not end") == 1, out
    assert "hog.py, pid" in out
    assert shown["disturbed_by"]["since_trial"] == 0
    assert shown["trials"][0]["outcome"] == "ok"
    assert shown["counts"].get("disturbed", 0) == 0
    assert shown["best"]["overrides"] == PLANTED
    assert "disturbed  " in study.say("show", "s").stdout


@pytest.mark.thorough
@pytest.mark.parametrize("is_hogged", [False, True])
def test_study_finds_the_planted_best_with_and_without_a_busy_program(tmp_path, hogs, is_hogged):
    overrides = ["measure.quiet=true", "study.budget.minutes=1.2", "measure.screening.min_s=2", "measure.screening.max_s=3"]
    study = trial_studies.start(tmp_path, "planted.py", SPACE, *overrides)
    if is_hogged:
        folder = wait_until(lambda: next((path for path in tmp_path.glob("runs/*") if path.is_dir()), None), "the study")
        hog_trial(folder, study.process, hogs, PLANTED, seconds=4)
    study.finish()
    summary = study.summary()
    records = [study.record(trial["number"]) for trial in summary["trials"]]
    disturbed = [record for record in records if was_disturbed(record)]
    assert bool(disturbed) is is_hogged, disturbed
    assert all(record["changed"] == PLANTED for record in disturbed if record["kind"] == "search")
    assert summary["best"]["overrides"] == PLANTED
    assert summary["counts"].get(Outcome.ok, 0) >= len(records) - len(disturbed) - 1
