"""Sockets and semaphores that loader workers leave if their trial ends early."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autotune.harness import sockets
from tests.harness.conftest import Trial
from tests.support.rows import more

HOLDS_A_SOCKET = """
import os, time
from multiprocessing import reduction, util
reduction.DupFd(0)
print(util.get_temp_dir(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder():
    """Returns a process that shares file descriptors through a socket, and the socket's folder."""
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_SOCKET], stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_sockets_of_the_given_processes_are_found_and_removed_with_their_folder(holder):
    process, folder = holder
    (listener,) = folder.iterdir()
    assert sockets.listening([os.getpid()]) == [], "the socket belongs to another process"
    assert sockets.listening([]) == []
    assert sockets.listening([os.getpid(), process.pid, 2**22 + 1]) == [str(listener)]
    sockets.remove([str(listener), str(folder.with_name("pymp-gone") / "listener")])
    assert not folder.exists()


def test_folder_that_contains_other_files_is_kept(holder):
    process, folder = holder
    (folder / "listener-another").touch()
    sockets.remove(sockets.listening([process.pid]))
    assert [path.name for path in folder.iterdir()] == ["listener-another"]
    (folder / "listener-another").unlink()
    folder.rmdir()


def test_missing_list_of_sockets_in_the_kernel_is_tolerated(holder, monkeypatch):
    process, folder = holder
    monkeypatch.setattr(sockets, "BOUND", "/nowhere")
    assert sockets.listening([process.pid]) == []
    process.kill()
    process.wait()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("method", ["forkserver", *more("spawn")])
def test_semaphores_of_workers_that_are_not_forked_are_removed_with_the_trial(trial: Trial, method: str) -> None:
    run = trial("workers.py", f"context={method}", mode="inspect", is_fresh=True)
    assert run.result().status == "measured"
    assert "leaked" not in run.stderr  # what multiprocessing's resource tracker says if it has to remove them


@pytest.mark.thorough
def test_a_measured_trial_with_workers_leaves_no_sockets(trial: Trial) -> None:
    with tempfile.TemporaryDirectory() as place:  # a socket's path has at most 107 characters
        run = trial("basic.py", "workers=2", is_fresh=True, env={"TMPDIR": place})
        assert run.result().status == "measured"
        assert [name for name in os.listdir(place) if name.startswith(sockets.FOLDER)] == []
