"""Trials hang in every possible place. All start at once, and none ends by itself."""

import re
import sys
import time

import pytest

from autotune.failures import classify
from autotune.launchers.base import Deadlines
from autotune.launchers.local import LocalLauncher
from autotune.records import Outcome
from tests.faults.trial_studies import PROGRAMS
from tests.support.launcher_contract import a_launch, is_alive

pytestmark = pytest.mark.thorough

FAULTY = [sys.executable, str(PROGRAMS / "faulty.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--max-restarts=0"]
START, STEP = Deadlines(start_s=15), Deadlines(start_s=60, step_s=3)
# What hangs -> (limits of the trial, kind of hang, part of the reason).
HANGS = {
    "hangs before import": (
        Deadlines(start_s=3),
        "user code",
        r"^start: .*phase: spawn\) .*; user code at faulty\.py:\d+ in <mod",
    ),
    "never steps": (START, "user code", r"^start: .*phase: first_batch\) within 15 s; user code at faulty\.py:\d+ in train"),
    "hangs in collate": (STEP, "loader", r"^step: .*; in the loader at faulty\.py:\d+ in collate"),
    "hangs in a worker": (STEP, "loader", r"^step: .*; waiting .*, whose worker process \d+ is at faulty\.py:\d+ in collate"),
    "is stopped": (STEP, "stopped", r"^step: .*; process \d+ of the program is stopped \(by SIGSTOP"),
    "waits for a rank": (
        STEP,
        "collective",
        r"; rank 0 waits .* at ranks\.py:\d+ in <mod.* while rank 1 is at ranks\.py:\d+ in think",
    ),
}
COMMANDS = {"waits for a rank": [*TORCHRUN, str(PROGRAMS / "ranks.py")]}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Yields {fault: (outcome, reason, evidence)}."""
    launcher, launches, running = LocalLauncher(), {}, {}
    for fault, (limits, _, _) in HANGS.items():
        folder = tmp_path_factory.mktemp("hang") / "runs" / "study" / "trials" / "0007"
        folder.parent.mkdir(parents=True)
        launches[fault] = a_launch(
            folder, COMMANDS.get(fault, FAULTY), env={"FAULT": fault, "OMP_NUM_THREADS": "1"}, deadlines=limits
        )
        launches[fault].spec.device = "cpu"
        running[fault] = launcher.start(launches[fault])
    found = {}
    while len(found) < len(running):
        for fault, trial in running.items():
            if fault not in found and (end := trial.poll()) is not None:
                outcome, reason = classify(end.facts(launches[fault].spec))
                found[fault] = (outcome, reason, end.evidence)
        time.sleep(0.05)
    yield found
    launcher.close()


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_is_a_timeout_whose_reason_names_the_place(ended, fault):
    outcome, reason, evidence = ended[fault]
    assert outcome is Outcome.timeout
    assert re.search(HANGS[fault][2], reason), reason
    assert evidence["hang"]["kind"] == HANGS[fault][1]


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_leaves_no_process(ended, fault):
    pids = [process["pid"] for process in ended[fault][2]["hang"]["processes"]]
    assert pids
    assert not any(is_alive(pid) for pid in pids)
