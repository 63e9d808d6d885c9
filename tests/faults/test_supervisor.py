"""The supervisor gets SIGKILL or SIGTERM: the attempt is repeated, the study reaches its verdict, nothing is left."""

import signal
import time

import pytest

from autotune.launchers.supervisor import LOOK_S
from tests.faults.stub_study import StubStudy, pids_in
from tests.support.launcher_contract import is_alive

pytestmark = pytest.mark.thorough

# In its first attempt, trial 1 starts a family of processes and waits.
STUCK_ONCE = """
progress('init'); progress('steady', 3)
if spec['trial'] == 1 and not os.path.exists('been_here'):
    open('been_here', 'w').close()
    family()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(60)
answer()
"""


@pytest.fixture
def study(tmp_path):
    made = StubStudy(tmp_path, STUCK_ONCE)
    yield made
    made.end()


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGTERM, "terminated from outside")]
)
def test_supervisor_that_ends_during_a_trial_costs_only_one_attempt(study, number, how):
    study.start()
    pids = pids_in(study.wait_for("trials/0001/pids"))
    supervisor = study.supervisor
    time.sleep(1.5 * LOOK_S)  # one look: without mark and parent, a daemon is recognised only if it was seen before
    supervisor.send_signal(number)
    code, output = study.wait()
    assert code == 0, output
    assert [pid for pid in [*pids, supervisor.pid] if is_alive(pid)] == []
    assert study.processes() == []
    summary = study.summary()
    assert summary["status"] == "complete"
    assert {trial["outcome"] for trial in summary["trials"]} == {"ok"}
    second = next(trial for trial in summary["trials"] if trial["number"] == 1)
    assert second["reason"] == "second attempt; the first ended as crash"
    record = (study.path / "trials" / "0001" / "trial.json").read_text()
    assert f"the supervisor, which watches over the trial's processes, was {how}" in record
