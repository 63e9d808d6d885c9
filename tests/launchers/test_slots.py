"""Slots of this machine: real processes in parallel, each with its own cores, GPUs and TMPDIR."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from autotune.harness.knobs.affinity import Core
from autotune.launchers import slots as slots_module
from autotune.launchers.local import LocalLauncher
from autotune.launchers.slots import SlotsLauncher, slots_of
from tests.support.launcher_contract import SHORT, a_launch, is_alive, marked_processes, wait, wait_for
from tests.support.stub_programs import program

FACTS = {"hostname": "bench", "num_cores": 2}
CORES = sorted(os.sched_getaffinity(0))
SEEN = "result(detected={'cores': sorted(os.sched_getaffinity(0)), 'env': dict(os.environ)})"
# Runs until there is a file `go` in the study's folder.
HELD = """
open(folder + "/here", "w").write(str(os.getpid()))
while not os.path.exists(folder + "/../../go"): time.sleep(0.02)
"""

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="this machine has a single core")


@pytest.fixture
def study(tmp_path):
    (tmp_path / "work").mkdir()
    folder = tmp_path / "runs" / "study"
    (folder / "trials").mkdir(parents=True)
    return folder


@pytest.fixture
def launcher(study):
    made = SlotsLauncher(slots_of(2, ["GPU-a", "GPU-b"], FACTS), SHORT)
    yield made
    made.close()
    assert not marked_processes(study)


def launch_of(study, number, body, **more):
    launch = a_launch(study / "trials" / f"{number:04d}", program(body), **more)
    launch.cwd, launch.spec.trial = str(study.parent.parent / "work"), number
    return launch


def start_both(launcher, study, body):
    return [part.start(launch_of(study, number, body)) for number, part in enumerate(launcher.beside(), 1)]


def test_two_trials_run_in_parallel_each_with_its_own_cores_gpu_and_tmpdir(launcher, study):
    running = start_both(launcher, study, HELD + SEEN)
    pids = [int(wait_for(study / "trials" / f"{number:04d}" / "here")) for number in (1, 2)]
    assert all(is_alive(pid) for pid in pids)
    (study / "go").touch()
    one, other = (wait(each).results[0].detected for each in running)
    assert not set(one["cores"]) & set(other["cores"])
    assert len(one["cores"]) == len(other["cores"]) == len(CORES) // 2
    assert [seen["env"]["CUDA_VISIBLE_DEVICES"] for seen in (one, other)] == ["GPU-a", "GPU-b"]
    folders = [seen["env"]["TMPDIR"] for seen in (one, other)]
    assert folders[0] != folders[1]
    assert all(os.path.isdir(folder) and len(folder) < 60 for folder in folders)
    launcher.close()
    assert not any(os.path.exists(folder) for folder in folders)


def test_trial_on_the_whole_machine_has_no_slot_settings(launcher, study, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    seen = wait(launcher.start(launch_of(study, 0, SEEN))).results[0].detected
    assert seen["cores"] == CORES
    assert "TMPDIR" not in seen["env"]
    assert seen["env"].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert seen["env"]["AUTOTUNE_MARK"] == f"{study}:0"


def test_killed_supervisor_ends_only_the_trial_of_its_slot(launcher, study):
    one, other = start_both(launcher, study, HELD + "result()")
    pid = int(wait_for(study / "trials" / "0001" / "here"))
    psutil.Process(pid).parent().send_signal(signal.SIGKILL)
    assert wait(one).cause == "lost"
    assert not is_alive(pid)
    first = launcher.beside()[0].start(launch_of(study, 3, "result()"))  # its sweep must spare the other slot
    assert wait(first).cause == "result"
    (study / "go").touch()
    assert wait(other).cause == "result"


def test_files_are_attributed_to_the_trial_that_wrote_them(launcher, study):
    body = "f = open(f'left{spec[\"trial\"]}.txt', 'w'); f.write('x'); f.flush(); time.sleep(1.0); result(); time.sleep(0.2)"
    ended = [wait(each) for each in start_both(launcher, study, body)]
    assert [list(one.evidence["files_left"]) for one in ended] == [["left1.txt"], ["left2.txt"]]


def test_checkpoint_of_another_slot_is_not_mistaken_for_one_of_the_user(launcher, study):
    body = "f = open('last.pt', 'wb'); f.write(b'\\0new'); f.flush(); time.sleep(1.0); result(); time.sleep(0.2)"
    first, second = launcher.beside()
    assert "last.pt" in wait(first.start(launch_of(study, 1, body))).evidence["files_left"]
    assert wait(second.start(launch_of(study, 2, body))).evidence["files_kept"] == []


def test_close_ends_the_trials_of_all_slots(launcher, study):
    start_both(launcher, study, HELD + "time.sleep(600)")
    pids = [int(wait_for(study / "trials" / f"{number:04d}" / "here")) for number in (1, 2)]
    launcher.close()
    assert not any(is_alive(pid) for pid in pids)


def test_sweep_of_a_study_ends_the_trials_of_all_slots(launcher, study):
    start_both(launcher, study, HELD + "time.sleep(600)")
    pids = [int(wait_for(study / "trials" / f"{number:04d}" / "here")) for number in (1, 2)]
    lines = LocalLauncher(SHORT).sweep(study)
    assert all(any(f"process {pid} (" in line for line in lines) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)


def test_sweep_of_a_study_removes_temporary_folders_of_its_killed_tuner(study):
    own, other, killed, anothers = (SlotsLauncher([], SHORT) for _ in range(4))
    try:
        for launcher in (other, killed):
            launcher.sweep(study)
        anothers.sweep(study.with_name("another"))
        for launcher in (killed, anothers):
            launcher._locked.close()  # the lock of a killed process is gone
        own.sweep(study)
        there = [Path(launcher._temporary.name).exists() for launcher in (own, other, killed, anothers)]
        assert there == [True, True, False, True]
    finally:
        for launcher in (own, other, killed, anothers):
            launcher.close()


def test_tmpdir_of_the_user_and_gpu_of_the_slot_take_precedence(launcher, study):
    launch = launch_of(study, 1, SEEN, env={"TMPDIR": str(study), "CUDA_VISIBLE_DEVICES": "7"})
    env = wait(launcher.beside()[0].start(launch)).results[0].detected["env"]
    assert (env["TMPDIR"], env["CUDA_VISIBLE_DEVICES"]) == (str(study), "GPU-a")


@pytest.mark.parametrize(
    ("nodes", "cores"),
    [
        ((0, 0, 1, 1), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ((1, 1, 0, 0), [(4, 5), (6, 7), (0, 1), (2, 3)]),  # as in a DGX A100
        ((1, 1, None, None), [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_a_slot_has_cores_near_its_gpu(monkeypatch, nodes, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(slots_module, "cores_of", lambda _, numbers: [Core(n // 4, n // 4, n, n) for n in sorted(numbers)])
    monkeypatch.setattr(slots_module, "gpu_node", lambda environment, _: nodes[int(environment["CUDA_VISIBLE_DEVICES"][-1])])
    slots = slots_of(4, [f"GPU-{n}" for n in range(4)], {"hostname": "dgx", "num_cores": 8})
    assert [slot.gpus for slot in slots] == [(f"GPU-{n}",) for n in range(4)]
    assert [slot.cores for slot in slots] == cores


def test_gpus_and_cores_are_divided_evenly_among_eight_slots(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(20)))
    slots = slots_of(8, [f"GPU-{n}" for n in range(8)], {"hostname": "dgx", "num_cores": 20})
    assert [slot.gpus for slot in slots] == [(f"GPU-{n}",) for n in range(8)]
    assert [len(slot.cores) for slot in slots] == [2] * 8
    assert len({core for slot in slots for core in slot.cores}) == 16
    assert [slot.name for slot in slots] == list("12345678")
    assert {slot.host for slot in slots} == {"dgx"}
