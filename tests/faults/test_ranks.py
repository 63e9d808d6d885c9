"""One of two ranks fails under torchrun: the trial has the outcome of that rank and names it, and no process is left."""

import re
import sys
import time

import psutil
import pytest

from autotune.config.command import starter
from autotune.failures import classify
from autotune.launchers import process_tree
from autotune.launchers.base import Deadlines
from autotune.launchers.environment import mark_of
from autotune.launchers.local import LocalLauncher
from autotune.records import Outcome
from tests.faults.trial_studies import PROGRAMS
from tests.support.launcher_contract import a_launch

COMMAND = [sys.executable, *starter(2), str(PROGRAMS / "ranks.py")]
# What happens to rank 1 -> (outcome of the trial, part of its reason).
ENDS = {
    "rank is killed": (Outcome.crash, r"^rank 1 was ended by SIGKILL in phase \w+ \(ended from outside"),
    "rank runs out of memory": (Outcome.host_oom, r"DefaultCPUAllocator.* \(rank 1\)"),
    "waits for a rank": (Outcome.timeout, r"within 3 s; rank 0 waits for .* while rank 1 is at ranks\.py:\d+ in think"),
    "rank leaves": (Outcome.error, r"^rank 1 ended by itself after 5 optimizer steps, the others did not"),
    "rank ends without a word": (Outcome.error, r"^rank 1 ended with exit status 3"),
}


def ended(faults, folder_of):
    """Runs the trials in parallel; returns {fault: (outcome, reason, processes that are left)}."""
    launcher, launches, running, found = LocalLauncher(), {}, {}, {}
    for fault in faults:
        folder = folder_of(fault.replace(" ", "_")) / "runs" / "study" / "trials" / "0007"
        folder.parent.mkdir(parents=True)
        # On a busy machine, torchrun needs some seconds to end the other ranks.
        env, limits = (
            {"FAULT": fault, "OMP_NUM_THREADS": "1"},
            Deadlines(start_s=60, step_s=3 if fault.startswith("waits") else 30),
        )
        launches[fault] = a_launch(folder, COMMAND, env=env, deadlines=limits)
        launches[fault].spec.device = "cpu"
        running[fault] = launcher.start(launches[fault])
    while len(found) < len(running):
        for fault, trial in running.items():
            if fault not in found and (end := trial.poll()) is not None:
                own = mark_of(launches[fault].folder.parent.parent, 7)
                left = [process for process in psutil.process_iter() if process_tree.mark(process) == own]
                found[fault] = (*classify(end.facts(launches[fault].spec)), left)
        time.sleep(0.05)
    launcher.close()
    return found


@pytest.mark.thorough
def test_a_killed_rank_decides_the_outcome_and_is_named(tmp_path_factory):
    fault = "rank is killed"
    check(ended([fault], tmp_path_factory.mktemp)[fault], fault)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "faults", [("rank runs out of memory", "waits for a rank"), ("rank leaves", "rank ends without a word")]
)
def test_the_failed_rank_decides_the_outcome_and_is_named(faults, tmp_path_factory):
    found = ended(faults, tmp_path_factory.mktemp)
    for fault in faults:
        check(found[fault], fault)


def check(found, fault):
    outcome, words = ENDS[fault]
    assert found[0] is outcome, found[1]
    assert re.search(words, found[1]), found[1]
    assert found[2] == []
