"""Several agents as the slots of one study, all on this machine."""

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from autotune.errors import BadInput, NoNode
from autotune.launchers.remote_slots import RemoteSlots
from tests.launchers.agents import PipeLauncher, place, ready
from tests.support.launcher_contract import a_launch, is_alive, marked_processes, wait, wait_for
from tests.support.stub_programs import program
from tests.support.waiting import comes

# Runs until there is a file `go` in the study's folder.
HELD = """
open(folder + "/here", "w").write(str(os.getpid()))
while not os.path.exists(folder + "/../../go"): time.sleep(0.02)
"""


@pytest.fixture
def parts(tmp_path):
    return [PipeLauncher(place(tmp_path)) for _ in range(2)]


@pytest.fixture
def launcher(parts, study):
    made = RemoteSlots(parts)
    yield made
    made.close()
    assert not marked_processes(study)


def launch_of(study, number, body):
    launch = a_launch(study / "trials" / f"{number:04d}", program(body))
    launch.spec.trial = number
    return launch


def test_trials_run_in_parallel_through_one_agent_each(launcher, study):
    ready(launcher)
    running = [part.start(launch_of(study, number, HELD + "result()")) for number, part in enumerate(launcher.beside(), 1)]
    pids = [int(wait_for(study / "trials" / f"{number:04d}" / "here")) for number in (1, 2)]
    assert all(is_alive(pid) for pid in pids)
    (study / "go").touch()
    assert [wait(each).cause for each in running] == ["result", "result"]
    assert [part.slot.name.partition(":")[0] for part in launcher.beside()] == ["1", "2"]


def test_trial_on_another_slot_of_the_same_machine_is_not_a_foreign_program(launcher, parts, study):
    ready(launcher)
    spin = "progress('steady', 5); over_s = time.monotonic() + 3; exec('while time.monotonic() < over_s: pass'); "
    body = spin + "result(detected={'pid': os.getpid()})"
    running = [part.start(launch_of(study, number, body)) for number, part in enumerate(launcher.beside(), 1)]
    pids = {os.getpid(), *(wait(each).results[0].detected["pid"] for each in running)}  # this process is the tuner
    assert pids.isdisjoint(pid for part in parts for pid, _ in part.watched.seen.cpu_use.culprits)


@pytest.mark.parametrize("is_alone", [True, False])
def test_only_trials_in_parallel_have_neighbours_that_are_not_foreign(launcher, parts, study, monkeypatch, is_alone):
    ready(launcher)
    asked = []
    monkeypatch.setattr(parts[0].node, "ask", lambda what, _, **fields: asked.append((what, fields.get("has_neighbours"))))
    (launcher if is_alone else launcher.beside()[0]).start(launch_of(study, 1, "result()"))
    assert asked == [("start", not is_alone)]
    monkeypatch.undo()


def test_lost_agent_is_replaced_without_affecting_the_other_slot(launcher, parts, study):
    ready(launcher)
    one, other = (part.start(launch_of(study, number, HELD + "result()")) for number, part in enumerate(launcher.beside(), 1))
    wait_for(study / "trials" / "0001" / "here")
    psutil.Process(parts[0].started[0].process.pid).send_signal(signal.SIGKILL)
    assert wait(one).evidence["node_lost"]
    again = launcher.beside()[0].start(launch_of(study, 3, "result()"))  # its agent sweeps the same machine
    assert wait(again).cause == "result"
    (study / "go").touch()
    assert wait(other).cause == "result"
    assert [len(part.started) for part in parts] == [2, 1]


def test_time_spent_waiting_for_slots_does_not_count(parts):
    launcher = RemoteSlots(parts)
    try:
        assert launcher.slots() == []
        begun_s, stood_s = time.monotonic(), launcher.clock.monotonic()
        ready(launcher)
        assert launcher.clock.monotonic() - stood_s < 0.5 * (time.monotonic() - begun_s)
    finally:
        launcher.close()


def test_reason_for_waiting_names_the_slot(tmp_path):
    mute = (sys.executable, "-S", "-c", "import sys; sys.stdin.read()")
    launcher = RemoteSlots([PipeLauncher(place(tmp_path)), PipeLauncher(place(tmp_path), argv=mute, patience_s=5.0)])
    assert launcher.slots() == []
    assert launcher.why_waiting() in ("slot 1: Resources", "slot 2: Resources")
    with pytest.raises(BadInput, match=r"^launch\.queue_minutes: .*\(slot 2: Resources\)"):
        ready(launcher)
    launcher.close()


@pytest.mark.thorough
def test_clock_is_paused_only_while_no_trial_runs_and_one_waits_for_a_node(launcher, parts, study, monkeypatch):
    ready(launcher)
    one, other = (part.start(launch_of(study, number, HELD + "result()")) for number, part in enumerate(launcher.beside(), 1))
    wait_for(study / "trials" / "0001" / "here")
    psutil.Process(parts[0].started[0].process.pid).send_signal(signal.SIGKILL)
    assert wait(one).evidence["node_lost"]
    monkeypatch.setattr(parts[0], "_argv", ("sleep", "60"))  # the queue is long
    waiting = parts[0].start(launch_of(study, 3, "result()"))
    assert waiting.poll() is None
    assert launcher.why_waiting() == "slot 1: Resources"
    assert launcher.clock._since_s is None  # the other trial runs
    (study / "go").touch()
    assert wait(other).cause == "result"
    assert waiting.poll() is None
    assert launcher.clock._since_s is not None
    again = parts[1].start(launch_of(study, 4, "result()"))
    assert launcher.clock._since_s is None
    wait(again)
    waiting.stop("over")
    comes(lambda: not marked_processes(study), within_s=15)  # those of the agent that was killed


def test_released_slots_end_and_trials_go_on_alone(launcher, parts, study):
    ready(launcher)
    launcher.release()
    assert [part.started[0].process.poll() is None for part in parts] == [True, False]
    assert wait(launcher.start(launch_of(study, 1, "result()"))).cause == "result"


def test_slot_that_gets_no_node_raises_when_its_trial_is_polled_not_when_it_starts(launcher, parts, study, monkeypatch):
    ready(launcher)
    parts[1].started[0].process.kill()
    parts[1].started[0].link._thread.join()
    monkeypatch.setattr(parts[1], "_argv", ("false",))
    running = parts[1].start(launch_of(study, 1, "result()"))
    with pytest.raises(NoNode, match="the agent ended with status 1"):
        wait(running)
    assert running.poll().cause == "stopped"


def test_slots_are_closed_at_the_same_time(parts, monkeypatch):
    all_are_closing = threading.Barrier(len(parts), timeout=20)
    for part in parts:
        monkeypatch.setattr(part, "close", all_are_closing.wait)
    RemoteSlots(parts).close()
    assert not all_are_closing.broken


def test_slots_on_different_kinds_of_nodes_are_refused(parts, monkeypatch):
    launcher = RemoteSlots(parts)
    facts = iter([{"num_cores": number} for number in (2, 2, 4, 4, 2, 4)])  # each node beside itself, then both together
    monkeypatch.setattr("autotune.launchers.remote.comparable", lambda _: next(facts))
    with pytest.raises(BadInput, match=r"is unlike node \S+, got num_cores 4 instead of 2\. .* launch\.slots=1\.$"):
        ready(launcher)
    launcher.close()


def on_ray(tmp_path, *devices):
    """Returns slots whose agents have these CUDA_VISIBLE_DEVICES from Ray."""
    environments = [{"RAY_JOB_ID": "01", "CUDA_VISIBLE_DEVICES": each} for each in devices]
    return RemoteSlots([PipeLauncher(place(tmp_path), environment=each) for each in environments])


def test_gpu_offered_by_two_ray_nodes_is_refused(tmp_path):
    launcher = on_ray(tmp_path, "0,1", "2,1")
    with pytest.raises(BadInput, match=r"^launcher: slots [12] and [12] have the same GPU, got 1 of node "):
        ready(launcher)
    launcher.close()


def test_gpu_of_a_slot_lost_unnoticed_is_free_for_another_slot(tmp_path, study):
    launcher = ready(on_ray(tmp_path, "0", "1"))
    one, other = launcher.beside()
    for part in (one, other):
        part.started[0].process.kill()
        part.started[0].link._thread.join()
    one._added["CUDA_VISIBLE_DEVICES"] = "1"
    assert wait(one.start(launch_of(study, 1, "result()"))).cause == "result"
    launcher.close()
