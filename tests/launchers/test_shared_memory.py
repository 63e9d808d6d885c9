"""Segments of shared memory that killed processes of a trial have left are removed; all other segments are kept."""

import errno
import json
import os
import platform
import subprocess
import sys
import time

import psutil
import pytest

from autotune.launchers import process_tree, shared_memory
from autotune.launchers.base import Slot
from autotune.launchers.local import LocalLauncher
from tests.support.waiting import wait_until

HOST, OTHER = shared_memory.FIRST["pid"], 0xF0000123  # inodes of PID namespaces: the host's and a container's


def dead_process():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def made(folder, name):
    (folder / name).touch()
    return name


def test_segments_named_after_a_dead_process_of_ours_are_removed(tmp_path):
    ours, strangers, now_s = dead_process(), dead_process(), time.time()
    left = sorted(made(tmp_path, name) for name in (f"torch_{ours}_123_0", f"torch_{ours}_123_1", f"pym-{ours}-abc_d1"))
    kept = [f"torch_{strangers}_5_0", f"torch_{ours}0_1_2", f"x_torch_{ours}_1_2", "psm_21467", f"torch_{os.getpid()}_1_1"]
    for name in kept:
        made(tmp_path, name)
    assert sorted(shared_memory.remove({ours: now_s, os.getpid(): now_s}, tmp_path)) == left
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)


def test_segment_older_than_the_process_is_kept(tmp_path):
    ours = dead_process()
    made(tmp_path, f"torch_{ours}_123_0")
    assert shared_memory.remove({ours: time.time() + 60}, tmp_path) == []


def test_missing_shared_memory_folder_gives_no_segments(tmp_path):
    assert shared_memory.remove({1: 0.0}, tmp_path / "nowhere") == []


def test_segments_of_a_trial_whose_supervisor_and_tuner_were_killed_are_removed(tmp_path):
    place, ours, strangers = tmp_path / "trials" / "0007", dead_process(), dead_process()
    place.mkdir(parents=True)
    shared_memory.note(place, [[ours, time.time()]])
    with (place / shared_memory.LIST_FILE).open("a") as file:
        file.write(json.dumps({"boot_id": "another boot", "processes": [[strangers, 1.0]]}) + '\n{"boot')
    left, kept = (shared_memory.FOLDER / f"torch_{pid}_4711_0" for pid in (ours, strangers))
    try:
        left.touch()
        kept.touch()
        shared_memory.remove_left(tmp_path)
        assert not left.exists()
        assert kept.exists()
        assert list(place.iterdir()) == []
    finally:
        left.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)


def test_process_list_of_another_host_is_kept(tmp_path):
    for number, host in enumerate(["far", platform.node()]):
        place = tmp_path / "trials" / f"000{number}"
        place.mkdir(parents=True)
        (place / shared_memory.LIST_FILE).write_text(json.dumps({"host": host, "boot_id": "another", "processes": [[7, 1.0]]}))
    shared_memory.remove_left(tmp_path)
    assert [file.parent.name for file in tmp_path.glob(f"trials/*/{shared_memory.LIST_FILE}")] == ["0000"]


def test_failed_rewrite_of_a_process_list_keeps_entries_of_other_hosts(tmp_path, monkeypatch):
    file = tmp_path / shared_memory.LIST_FILE
    shared_memory.note(tmp_path, [[dead_process(), 1.0]])
    far = json.dumps({"host": "far", "boot_id": "another", "processes": [[7, 1.0]]})
    before = f"{file.read_text()}{far}\n"
    file.write_text(before)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        shared_memory.forget(tmp_path)
    assert [each.read_text() for each in tmp_path.iterdir()] == [before]
    shared_memory.forget(tmp_path)
    assert [each.read_text() for each in tmp_path.iterdir()] == [f"{far}\n"]


@pytest.fixture
def segment():
    """Returns a function that makes a segment of a process in the machine's shared memory; all are removed after the test."""
    made = []

    def make(pid):
        made.append(shared_memory.FOLDER / f"torch_{pid}_4711_0")
        made[-1].touch()
        return made[-1]

    yield make
    for file in made:
        file.unlink(missing_ok=True)


@pytest.fixture
def listed(tmp_path):
    """Returns a function that lists processes as those of a running trial, and returns the trial's folder."""

    def make(number, *pids):
        place = tmp_path / "trials" / f"{number:04d}"
        place.mkdir(parents=True, exist_ok=True)
        shared_memory.note(place, [[pid, time.time()] for pid in pids])
        return place

    return make


def test_sweep_of_a_slot_spares_segments_of_a_trial_running_on_another_slot(tmp_path, segment, listed):
    with subprocess.Popen(["sleep", "60"]) as running:
        created_s = psutil.Process(running.pid).create_time()
        killed, worker = dead_process(), dead_process()
        over, other = listed(1, killed), listed(2, worker)
        shared_memory.note(other, [[running.pid, created_s]])
        left, used = segment(killed), segment(worker)
        LocalLauncher(slot=Slot(name="1", host="n1", gpus=(), cores=(), facts={})).sweep(tmp_path)
        assert not left.exists()
        assert used.exists()
        assert list(over.iterdir()) == []
        assert (other / shared_memory.LIST_FILE).exists()
        running.kill()


def test_process_ids_of_another_pid_namespace_are_ignored(tmp_path, segment, listed, monkeypatch):
    pid = dead_process()
    monkeypatch.setattr(shared_memory, "namespace", {"pid": OTHER, "ipc": OTHER}.get)
    place = listed(1, pid)
    monkeypatch.undo()
    kept = segment(pid)
    shared_memory.remove_left(tmp_path)
    assert kept.exists()
    listed(1, dead_process())  # the second attempt, in this namespace
    shared_memory.forget(place)
    (line,) = (place / shared_memory.LIST_FILE).read_text().splitlines()
    assert json.loads(line)["pid_namespace"] == OTHER


def test_process_list_without_a_pid_namespace_is_ignored_and_kept(tmp_path, segment, listed):
    pid = dead_process()
    file = listed(1, pid) / shared_memory.LIST_FILE
    line = json.loads(file.read_text())
    del line["pid_namespace"]
    file.write_text(json.dumps(line))
    kept = segment(pid)
    shared_memory.remove_left(tmp_path)
    assert kept.exists()
    assert file.exists()


@pytest.mark.parametrize(
    ("pid_namespace", "is_of_host", "is_removed"), [(HOST, True, True), (OTHER, True, False), (OTHER, False, True)]
)
def test_container_that_shares_memory_with_its_host_removes_no_segment(
    tmp_path, monkeypatch, pid_namespace, is_of_host, is_removed
):
    """Processes of the host and of other containers are not visible in a container."""
    ipc = shared_memory.FIRST["ipc"] if is_of_host else OTHER
    monkeypatch.setattr(shared_memory, "namespace", {"pid": pid_namespace, "ipc": ipc}.get)
    pid = dead_process()
    made(tmp_path, name := f"torch_{pid}_1_0")
    assert shared_memory.remove({pid: time.time()}, tmp_path) == ([name] if is_removed else [])


def test_segment_is_kept_while_its_process_id_is_in_use_in_a_container(tmp_path, monkeypatch):
    with subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sleep", "60"], stderr=subprocess.PIPE) as container:
        try:
            give_up_s = time.monotonic() + 5
            while "sleep" not in [child.name() for child in psutil.Process(container.pid).children()]:
                if container.poll() is not None or time.monotonic() > give_up_s:
                    pytest.skip("no PID namespace can be made here (needs root)")
            monkeypatch.setattr(process_tree, "is_taken", lambda _: False)  # as if no process had this id here
            made(tmp_path, "torch_1_4711_0")
            assert shared_memory.remove({1: time.time()}, tmp_path) == []
        finally:
            container.kill()


def test_a_segment_stays_while_a_process_has_it_open(tmp_path):
    pid = dead_process()
    name = made(tmp_path, f"torch_{pid}_1_0")
    with (tmp_path / name).open("r+b"):
        assert shared_memory.remove({pid: time.time()}, tmp_path) == []
    assert shared_memory.remove({pid: time.time()}, tmp_path) == [name]


ENDS_ITS_MAIN_THREAD = """
import ctypes, mmap, sys, threading, time
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
threading.Thread(target=time.sleep, args=(60,)).start()
print("mapped", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_counts_as_running_until_its_last_thread_has_exited(tmp_path):
    """The kernel releases the memory only then. A killed process can look like a zombie for some time before."""
    (tmp_path / "file").write_bytes(bytes(4096))
    words = [sys.executable, "-c", ENDS_ITS_MAIN_THREAD, str(tmp_path / "file")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as running:
        try:
            assert running.stdout.readline() == b"mapped\n"
            process = psutil.Process(running.pid)
            wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
            assert process_tree.is_alive(process)
            name = f"torch_{running.pid}_1_0"
            (tmp_path / "file").rename(tmp_path / name)
            assert shared_memory.remove({running.pid: process.create_time()}, tmp_path) == []
        finally:
            running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert not process_tree.is_alive(process)
        assert shared_memory.remove({running.pid: process.create_time()}, tmp_path) == [name]
