"""What the launcher's contract does not cover: a killed or suspended supervisor, parallel trials, and shared memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.errors import AutotuneError
from autotune.failures import classify
from autotune.launchers import local, shared_memory
from autotune.launchers.local import Graces, LocalLauncher
from autotune.launchers.supervision import SupervisorLost
from autotune.records import Outcome
from tests.launchers.test_local import TUNER
from tests.support.launcher_contract import a_launch, gone, is_alive, marked_processes, started, wait, wait_for
from tests.support.stub_programs import IGNORES_SIGTERM, SLEEP, program

SHORT = Graces(ranks_s=0.8, leave_s=0.2, orphans_s=0.3, terminate_s=0.5, kill_s=2.0)
SHM = Path("/dev/shm")


@pytest.fixture
def launcher(study):
    made = LocalLauncher(SHORT)
    yield made
    made.close()
    assert marked_processes(study) == []


def supervisor_of(study):
    (found,) = [process for process in marked_processes(study) if "autotune.launchers.supervisor" in process.cmdline()]
    return found


def test_trials_share_one_supervisor_that_ends_with_the_launcher(launcher, folder, study):
    wait(launcher.start(a_launch(folder, program("result()"))))
    first = supervisor_of(study)
    wait(launcher.start(a_launch(folder, program("result()"))))
    assert supervisor_of(study) == first
    assert first.ppid() == os.getpid()
    assert os.getsid(first.pid) == first.pid
    launcher.close()
    assert not is_alive(first.pid)


def test_no_messages_of_ended_trials_are_kept(launcher, folder):
    for number in range(3):
        assert wait(launcher.start(a_launch(folder.with_name(f"{number:04d}"), program("result()")))).cause == "result"
    assert launcher._supervisor._inbox == {}


def test_killed_supervisor_makes_the_trial_a_crash_and_is_replaced(launcher, folder, study):
    launch = a_launch(folder, program(SLEEP))
    running = launcher.start(launch)
    pid = int(wait_for(folder / "pid"))
    supervisor_of(study).kill()
    ended = wait(running)
    assert not is_alive(pid)
    assert (ended.cause, ended.exit_code, ended.signal) == ("lost", None, None)
    outcome, reason = classify(ended.facts(launch.spec))
    assert outcome is Outcome.crash
    assert reason == "the supervisor, which watches over the trial's processes, was killed by SIGKILL; the trial ended with it"
    assert wait(launcher.start(a_launch(folder, program("result()")))).cause == "result"


def test_supervisor_killed_between_trials_is_replaced_silently(launcher, folder, study):
    wait(launcher.start(a_launch(folder, program("result()"))))
    supervisor_of(study).kill()
    assert wait(launcher.start(a_launch(folder, program("result()")))).cause == "result"


@pytest.mark.thorough
@pytest.mark.parametrize(("num_kills", "is_started"), [(3, True), (5, False)])
def test_supervisor_killed_at_each_start_is_replaced_a_limited_number_of_times(
    launcher, folder, monkeypatch, num_kills, is_started
):
    killed, start = [], local.SupervisorProcess.start

    def start_and_kill(supervisor, *words, **more):
        if len(killed) < num_kills:
            supervisor.kill()
            killed.append(supervisor)
            raise SupervisorLost(supervisor.end)
        start(supervisor, *words, **more)

    monkeypatch.setattr(local.SupervisorProcess, "start", start_and_kill)
    launch = a_launch(folder, program("result()"))
    if is_started:
        assert wait(launcher.start(launch)).cause == "result"
    else:
        with pytest.raises(AutotuneError, match="cannot be kept running: it was killed by SIGKILL"):
            launcher.start(launch)


def test_memory_segments_of_a_trial_are_removed_if_its_supervisor_was_killed(launcher, folder, study):
    running, pid = started(launcher, folder, f"open('/dev/shm/torch_%d_4711_0' % os.getpid(), 'w')\n{SLEEP}")
    assert running.poll() is None
    supervisor_of(study).kill()
    assert gone(pid)  # the kernel ends the trial; the tuner has not polled yet
    wait(running)
    assert not (SHM / f"torch_{pid}_4711_0").exists()


def test_processes_of_a_running_trial_are_listed_so_that_a_sweep_can_clean_up(launcher, folder, study):
    running, pid = started(launcher, folder, f"open('/dev/shm/torch_%d_4711_0' % os.getpid(), 'w')\n{SLEEP}")
    listed = folder / shared_memory.LIST_FILE
    while not listed.exists():
        assert running.poll() is None
    supervisor_of(study).kill()
    assert gone(pid)
    launcher.sweep(study)  # as a resumed study does; this tuner has not polled yet
    assert not (SHM / f"torch_{pid}_4711_0").exists()
    wait(running)
    assert not listed.exists()


def test_results_written_before_the_supervisor_was_killed_count(launcher, folder, study):
    running, _ = started(launcher, folder, f"result(); {SLEEP}")
    supervisor_of(study).kill()
    assert wait(running).cause == "result"


@pytest.mark.thorough
def test_trial_can_be_stopped_while_its_supervisor_is_suspended(launcher, folder, study, monkeypatch):
    monkeypatch.setattr(local, "STUCK_S", 0.3)
    running, pid = started(launcher, folder)
    supervisor_of(study).send_signal(signal.SIGSTOP)
    running.stop("interrupted by the user")
    assert not is_alive(pid)
    assert running.poll().cause == "stopped"


def test_signals_during_the_stop_of_a_trial_are_handled_after_it(launcher, folder, monkeypatch):
    running, pid = started(launcher, folder, f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}")
    waits, were_alive = launcher._supervisor.wait, []

    def interrupted(seconds):
        were_alive.append(is_alive(pid))
        signal.raise_signal(signal.SIGINT)
        waits(seconds)

    monkeypatch.setattr(launcher._supervisor, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.stop("interrupted by the user")
    assert were_alive.count(True) > 2
    assert not is_alive(pid)
    assert running.poll().cause == "stopped"


def test_parallel_trials_are_ended_independently(launcher, folder):
    body = f"child = spawn({IGNORES_SIGTERM!r}, start_new_session=True, env={{}}, stdout=subprocess.PIPE)\n"
    body += "child.stdout.readline(); open(folder + '/pid', 'w').write(str(child.pid)); "
    one, its_child = started(launcher, folder, body + "time.sleep(600)")
    launch = a_launch(folder.with_name("0008"), program(body + "time.sleep(600)"))
    launch.spec.trial = 8
    other = launcher.start(launch)
    others_child = int(wait_for(launch.folder / "pid"))
    one.stop("enough")
    assert not is_alive(its_child)
    assert one.poll().problems == []
    assert other.poll() is None
    assert is_alive(others_child)
    other.stop("enough")
    assert not is_alive(others_child)


def test_secrets_of_a_trial_are_not_visible_in_the_supervisor_or_in_files(launcher, folder, study):
    running = launcher.start(a_launch(folder, program(SLEEP), env={"MY_TOKEN": "s3cr3t"}))
    wait_for(folder / "pid")
    supervisor = supervisor_of(study)
    assert not any("s3cr3t" in word for word in [*supervisor.cmdline(), *supervisor.environ().values()])
    running.stop("enough")
    assert not any(b"s3cr3t" in file.read_bytes() for file in study.rglob("*") if file.is_file())


def test_memory_segments_of_a_worker_that_was_killed_are_removed(launcher, folder):
    # The worker is killed and reaped by its parent, so only the segment's name shows whose it was.
    worker = (
        "import os, sys, time; open('/dev/shm/torch_%d_4711_0' % os.getpid(), 'w'); print(os.getpid()); sys.stdout.flush(); "
    )
    body = f"worker = spawn({worker + 'time.sleep(600)'!r}, stdout=subprocess.PIPE); pid = int(worker.stdout.readline())\n"
    body += f"""
def is_noted():
    file = os.path.join(folder, {shared_memory.LIST_FILE!r})
    return os.path.exists(file) and f"[{{pid}}, " in open(file).read()
while not is_noted(): time.sleep(0.02)
worker.kill(); worker.wait(); result(detected={{"pid": pid}})
"""
    ended = wait(launcher.start(a_launch(folder, program(body))))
    name = f"torch_{ended.results[0].detected['pid']}_4711_0"
    assert not (SHM / name).exists()


def test_resource_tracker_lives_long_enough_to_remove_shared_memory(launcher, folder):
    body = f"""
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=64)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open('segment', 'w').write(segment.name)
{SLEEP}
"""
    running, pid = started(launcher, folder, body)
    name = (folder.parent / "segment").read_text()
    assert (SHM / name).exists()
    running.stop("enough")
    assert not is_alive(pid)
    assert not (SHM / name).exists()


@pytest.mark.thorough
def test_segments_that_torch_shares_by_file_name_are_removed_with_a_stopped_trial(launcher, folder):
    body = f"""
import torch
torch.multiprocessing.set_sharing_strategy("file_system")
tensor = torch.ones(1000).share_memory_()
{SLEEP}
"""
    running = launcher.start(a_launch(folder, [arg for arg in program(body) if arg != "-S"]))
    pid = int(wait_for(folder / "pid"))
    assert list(SHM.glob(f"torch_{pid}_*"))
    running.stop("enough")
    assert not list(SHM.glob(f"torch_{pid}_*"))


def test_supervisor_that_cannot_start_says_why(launcher, folder, monkeypatch):
    launch = a_launch(folder, program("result()"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(AutotuneError, match=r"watches over the trials cannot be started \(.*'/nowhere/python'"):
        launcher.start(launch)


def test_sweep_ends_a_supervisor_that_was_suspended_when_its_tuner_died(launcher, folder, study):
    with subprocess.Popen([sys.executable, "-c", TUNER, str(folder), *program(SLEEP)]) as tuner:
        pid = int(wait_for(folder / "pid"))
        supervisor = supervisor_of(study)
        supervisor.send_signal(signal.SIGSTOP)
        tuner.kill()
    assert is_alive(pid)
    assert f"ended process {supervisor.pid} (" in "".join(launcher.sweep(study))
    assert not is_alive(pid)
    assert not is_alive(supervisor.pid)


def test_idle_supervisor_wakes_up_rarely(launcher, folder, study):
    running, _ = started(launcher, folder)
    supervisor = supervisor_of(study)
    before = supervisor.num_ctx_switches().voluntary
    time.sleep(2.2)
    assert supervisor.num_ctx_switches().voluntary - before < 20
    running.stop("enough")


def test_tuner_that_exits_without_closing_leaves_no_process(study, folder):
    tuner = TUNER.replace("while True", "while not (Path(sys.argv[1]) / 'pid').exists()")
    argv = [sys.executable, "-c", tuner, str(folder), *program(SLEEP)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not is_alive(int((folder / "pid").read_text()))
    assert marked_processes(study) == []
