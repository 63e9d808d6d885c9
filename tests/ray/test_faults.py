"""Kills parts of a study on Ray. Each loss must be reported, no process may be left, and the next trial must run."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from autotune.failures import classify
from autotune.launchers.environment import own_environment
from autotune.records import Outcome
from tests.faults.quick_study import QuickStudy, kill
from tests.launchers.agents import place, ready
from tests.launchers.losses import (
    FAMILY,
    agents,
    began,
    check_study_without_its_job,
    listening,
    lost,
    nothing_left,
    resume_after_a_killed_tuner,
    runs_again,
    strangers,
)  # fmt: skip
from tests.launchers.slots_of_a_cluster import GIVEN, check_loss_of_all_slots
from tests.ray.conftest import launcher_on
from tests.ray.private import PrivateRay, why_not
from tests.support.launcher_contract import a_launch, wait_for
from tests.support.stub_programs import program
from tests.support.waiting import wait_until

TUNER = """
import sys, time
from pathlib import Path
from autotune.config.schema import RayOptions
from autotune.launchers.ray.launcher import RayLauncher
from tests.support.launcher_contract import SHORT, a_launch
from tests.launchers.agents import place
folder = Path(sys.argv[1])
launcher = RayLauncher(RayOptions(address=sys.argv[2], gpus=int(sys.argv[3])), place(folder.parent), graces=SHORT)
running = launcher.start(a_launch(folder, sys.argv[4:]))
while True:
    running.poll(); print(launcher.why_waiting(), flush=True); time.sleep(0.1)
"""


@pytest.fixture
def here(ray):
    """Returns a function that lists this Ray cluster's agents and actors."""
    return lambda: [*agents("TMPDIR", str(ray.folder)), *ray.workers()]


@pytest.fixture
def other(ray):
    """A second node's name; the node is removed after the test."""
    ray.add("other", cpus=8)
    yield "other"
    ray.remove("other")


@pytest.mark.parametrize("victim", ["actor", "broker", "agent"])
def test_killed_process_between_tuner_and_trial_ends_the_trial_without_leftovers(make, ray, here, folder, victim):
    launcher = ready(make())
    launch, running, pids = began(launcher, folder)
    (agent,), (actor,) = agents("TMPDIR", str(ray.folder)), ray.workers()
    os.kill({"broker": launcher._transport._process.pid, "actor": actor.pid, "agent": agent.pid}[victim], signal.SIGKILL)
    ended = lost(running, 15)
    assert ended.evidence["node_lost"]
    assert classify(ended.facts(launch.spec))[0] is Outcome.interrupted
    assert nothing_left(folder.parent.parent, pids, here, 10)
    runs_again(launcher, folder)


@pytest.mark.thorough
@pytest.mark.parametrize("sent", [os.urandom(1 << 16), b""], ids=["noise", "nothing"])
def test_foreign_connection_to_the_broker_does_not_disturb_a_trial(make, ray, folder, sent):
    launcher = ready(make())
    running = launcher.start(a_launch(folder, program('progress("warmup", 1); time.sleep(3); result()')))
    wait_for(folder / "progress.jsonl")
    (agent,) = agents("TMPDIR", str(ray.folder))
    assert listening(agent) == []
    connections = strangers(psutil.Process(launcher._transport._process.pid), sent)
    assert connections != []
    assert lost(running, 30).cause == "result"
    for each in connections:
        each.close()


def test_killed_tuner_leaves_no_process_on_the_node(ray, here, folder):
    argv = [sys.executable, "-c", TUNER, str(folder), ray.address, "0", *program(FAMILY)]
    tuner = subprocess.Popen(argv, env=own_environment(), stdout=subprocess.DEVNULL)
    pids = [int(pid) for pid in wait_for(folder / "pids").split()]
    kill(tuner)
    assert nothing_left(folder.parent.parent, pids, here, 10)


@pytest.mark.thorough
def test_tuner_killed_while_waiting_for_a_node_leaves_no_broker(make, ray, here, folder):
    ready(make(gpus=2))
    argv = [sys.executable, "-c", TUNER, str(folder), ray.address, "1", *program(FAMILY)]
    with subprocess.Popen(argv, env=own_environment(), stdout=subprocess.PIPE, text=True) as tuner:
        for line in tuner.stdout:
            if "no node for 1 GPU" in line:
                break
        broker = psutil.Process(tuner.pid).children()
        kill(tuner)
    assert psutil.wait_procs(broker, timeout=10)[1] == []


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["broker", "actor", "agent"])
def test_stopped_process_between_tuner_and_trial_ends_the_trial_without_leftovers(make, ray, here, folder, victim):
    launcher = ready(make())
    _, running, pids = began(launcher, folder)
    (agent,), (actor,) = agents("TMPDIR", str(ray.folder)), ray.workers()
    os.kill({"broker": launcher._transport._process.pid, "actor": actor.pid, "agent": agent.pid}[victim], signal.SIGSTOP)
    assert lost(running, 45).evidence["node_lost"]
    assert nothing_left(folder.parent.parent, pids, here, 40)


@pytest.mark.thorough
def test_stopped_tuner_has_no_trial_running_after_the_lease(ray, here, folder):
    argv = [sys.executable, "-c", TUNER, str(folder), ray.address, "0", *program(FAMILY)]
    tuner = subprocess.Popen(argv, env=own_environment(), stdout=subprocess.DEVNULL)
    pids = [int(pid) for pid in wait_for(folder / "pids").split()]
    tuner.send_signal(signal.SIGSTOP)
    try:
        assert nothing_left(folder.parent.parent, pids, here, 50)
    finally:
        kill(tuner)


@pytest.mark.thorough
@pytest.mark.parametrize("only", [("raylet",), ()], ids=["raylet", "node"])
def test_lost_node_is_reported_in_time_and_left_empty(make, ray, other, here, folder, only):
    launcher = ready(make(cpus=8))
    _, running, pids = began(launcher, folder)
    ray.kill(other, *only)
    assert lost(running, 45).evidence["node_lost"]
    assert nothing_left(folder.parent.parent, pids, here, 40)
    again = launcher.start(a_launch(folder, program("result()")))
    assert again.poll() is None  # it waits for a node, and can be stopped
    again.stop("interrupted by the user")


@pytest.mark.thorough
def test_lost_head_ends_the_trial_and_the_next_waits_until_the_head_is_back(folder, tmp_path):
    if why := why_not():
        pytest.skip(why)
    ray = PrivateRay()  # a new cluster, so that the other tests keep theirs
    try:
        ray.add("other", cpus=8)
        launcher = ready(launcher_on(ray, place(tmp_path), cpus=8))
        _, running, pids = began(launcher, folder)
        ray.kill("head")
        assert lost(running, 100).evidence["node_lost"]
        assert nothing_left(folder.parent.parent, pids, lambda: agents("TMPDIR", str(ray.folder)), 40)
        running = launcher.start(a_launch(folder, program("result()")))
        wait_until(lambda: [running.poll(), launcher.why_waiting()][1], "the reason for waiting")
        assert launcher.why_waiting().startswith(f"Ray's head does not answer ({ray.address}: ")
        ray.restart("head")
        assert lost(running, 120).cause == "result"
        launcher.close()
    finally:
        ray.stop()


@pytest.mark.thorough
def test_study_continues_after_its_actor_was_killed(ray, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.0)
    lose = lambda: [actor.kill() for actor in ray.workers()]  # noqa: E731
    check_study_without_its_job(study, lose, "launcher=ray", f"launch.ray.address={ray.address}")


@pytest.mark.thorough
def test_a_study_whose_tuner_was_killed_is_resumed_with_a_new_agent(ray, tmp_path):
    study = QuickStudy(tmp_path, trial_s=0.5)
    resume_after_a_killed_tuner(study, ray.is_idle, "launcher=ray", f"launch.ray.address={ray.address}")


@pytest.mark.thorough
def test_study_continues_after_losing_all_its_slots_at_once(ray, tmp_path):
    study = QuickStudy(tmp_path, trial_s=1.5)
    process = study.start("launcher=ray", f"launch.ray.address={ray.address}", *GIVEN, "launch.slots=2")
    check_loss_of_all_slots(study, process, lambda: [actor.kill() for actor in ray.workers()])
    assert ray.is_idle()
