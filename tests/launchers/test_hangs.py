"""What stacks of processes reveal about a hang (real stacks, shortened), and which processes are asked for their stack."""

import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest

from autotune.harness import stack_requests
from autotune.harness.protocol import STACK_SIGNAL, Spec
from autotune.launchers import hangs
from autotune.launchers.environment import PACKAGE
from autotune.launchers.hangs import Looked, look, parsed, understood

TORCH = "/v/lib/python3.11/site-packages/torch"
MAIN = '  File "/home/me/train.py", line 40 in main'
LOADER_WAIT = f"""
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "{TORCH}/utils/data/dataloader.py", line 1293 in _try_get_data
  File "{TORCH}/utils/data/dataloader.py", line 725 in __next__
  File "/home/me/tools/autotune/harness/loaders.py", line 130 in __next__
{MAIN}"""
IDLE_WORKER = f"""
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113 in get
  File "{TORCH}/utils/data/_utils/worker.py", line 335 in _worker_loop
{MAIN}"""
BUSY_WORKER = f"""
  File "/home/me/data.py", line 7 in __getitem__
  File "{TORCH}/utils/data/_utils/fetch.py", line 54 in fetch
  File "{TORCH}/utils/data/_utils/worker.py", line 351 in _worker_loop
{MAIN}"""
FORK_SERVER = """
  File "/usr/lib/python3.14/selectors.py", line 415 in select
  File "/usr/lib/python3.14/multiprocessing/forkserver.py", line 302 in main
  File "<string>", line 1 in <module>"""
SERVED = """
  File "/usr/lib/python3.14/multiprocessing/forkserver.py", line 420 in _serve_one
  File "/usr/lib/python3.14/multiprocessing/forkserver.py", line 361 in main
  File "<string>", line 1 in <module>"""
BARRIER = f"""
  File "{TORCH}/distributed/distributed_c10d.py", line 4700 in barrier
{MAIN}"""
BACKWARD = f"""
  File "{TORCH}/autograd/graph.py", line 829 in _engine_run_backward
  File "{TORCH}/_tensor.py", line 630 in backward
{MAIN}"""
COMPILING = f"""
  File "{TORCH}/_inductor/compile_fx.py", line 700 in compile_fx
  File "{TORCH}/_dynamo/output_graph.py", line 3232 in _call_user_compiler
  File "{TORCH}/_dynamo/convert_frame.py", line 1701 in compile_inner
{MAIN}"""
GENERATED = f"""
  File "{TORCH}/_inductor/async_compile.py", line 912 in wait
  File "/tmp/torchinductor_me/b7/c{"b7itriwamk" * 5}2.py", line 9 in <module>
{COMPILING}"""
IMPORTING = f"""
  File "<frozen importlib._bootstrap_external>", line 940 in exec_module
  File "{TORCH}/_dynamo/convert_frame.py", line 28 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
{MAIN}"""
IMPORTING_THERE = f"""
  File "/v/lib/python3.11/site-packages/sympy/matrices/eigen.py", line 15 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "{TORCH}/nn/parallel/distributed.py", line 1447 in __init__
{MAIN}"""
AGENT = f"""
  File "{TORCH}/distributed/elastic/agent/server/api.py", line 900 in _invoke_run
{MAIN}"""


RENDEZVOUS = f"""
  File "{TORCH}/distributed/elastic/rendezvous/dynamic_rendezvous.py", line 700 in _join_rendezvous
  File "{TORCH}/distributed/run.py", line 1120 in run
{MAIN}"""


def found(stack, rank=None, world_size=1, state="sleeping", pid=7, host=""):
    return Looked(pid=pid, state=state, rank=rank, world_size=world_size, host=host, frames=parsed(stack))


AT = "train.py:40 in main"
SELECT, IN_BARRIER = "(inside select, selectors.py:415)", "(inside barrier, distributed_c10d.py:4700)"
IN_BACKWARD = "(inside _engine_run_backward, graph.py:829)"


@pytest.mark.parametrize(
    ("processes", "kind", "summary"),
    [
        ([found(MAIN)], "user code", f"user code at {AT}"),
        ([found(BACKWARD)], "user code", f"user code at {AT} {IN_BACKWARD}"),
        ([found(IMPORTING)], "user code", f"user code at {AT} (in an import)"),
        ([found(COMPILING)], "compile", f"in torch's compiler, called at {AT} (inside compile_fx, compile_fx.py:700)"),
        ([found(GENERATED)], "compile", f"in torch's compiler, called at {AT} (inside wait, async_compile.py:912)"),
        (
            [found(LOADER_WAIT), found(IDLE_WORKER), found(BUSY_WORKER, pid=9)],
            "loader",
            "waiting for the loader, whose worker process 9 is at data.py:7 in __getitem__",
        ),
        (
            [found(LOADER_WAIT), found(FORK_SERVER), found(BUSY_WORKER + SERVED, pid=9)],
            "loader",
            "waiting for the loader, whose worker process 9 is at data.py:7 in __getitem__",
        ),
        (
            [found(LOADER_WAIT), found(IDLE_WORKER)],
            "loader",
            f"waiting at {AT} {SELECT} for the loader, whose workers are idle",
        ),
        (
            [found(AGENT), found(BARRIER, 0, 2), found(MAIN, 1, 2)],
            "collective",
            f"rank 0 waits for the other ranks at {AT} {IN_BARRIER}, while rank 1 is at {AT}",
        ),
        (
            [found(IMPORTING_THERE, 0, 2), found(IMPORTING_THERE, 1, 2)],
            "user code",
            f"user code at {AT} (in an import)",
        ),
        (
            [found(BACKWARD, 0, 2), found(LOADER_WAIT, 1, 2)],
            "collective",
            f"rank 0 waits for the other ranks at {AT} {IN_BACKWARD}, while rank 1 is at {AT} {SELECT}",
        ),
        (
            [found(BARRIER, 1, 2)],
            "collective",
            f"rank 1 waits for the other ranks at {AT} {IN_BARRIER}; rank 0 of 2 missing (ended, never started, or unable to "
            "answer)",
        ),
        (
            [found(BARRIER, 0, 2), found(BACKWARD, 1, 2)],
            "collective",
            f"all 2 ranks wait for each other: rank 0 at {AT} {IN_BARRIER}; rank 1 at {AT} {IN_BACKWARD}",
        ),
        (
            [found(MAIN), found("", state="stopped", pid=8)],
            "stopped",
            "process 8 of the program is stopped (by SIGSTOP, or in a debugger)",
        ),
        (
            [found("", state="disk-sleep in nfs_wait")],
            "unknown",
            "no stack could be read (process 7 disk-sleep in nfs_wait)",
        ),
        ([], "unknown", "no process of the trial is left"),
        (
            [found(BARRIER, 0, 2), found(MAIN, 1, 2, host="n2")],
            "collective",
            f"rank 0 waits for the other ranks at {AT} {IN_BARRIER}, while rank 1 on n2 is at {AT}",
        ),
        (
            [found(BARRIER, 0, 4)],
            "collective",
            f"rank 0 waits for the other ranks at {AT} {IN_BARRIER}; rank 1 of 4 and 2 more missing (ended, never started, or "
            "unable to answer)",
        ),
        (
            [found(RENDEZVOUS, 0, 2, host="n2"), found(RENDEZVOUS, 1, 2, host="n3")],
            "rendezvous",
            "torchrun on n2, n3 waits for the other nodes: fewer than --nnodes have met at --rdzv_endpoint, or some cannot "
            "reach it",
        ),
    ],
)
def test_hang_is_classified_from_the_stacks_of_all_processes(processes, kind, summary):
    hang = understood(processes)
    assert (hang.kind, hang.summary) == (kind, summary)


def test_stack_of_the_main_thread_is_the_last_one_written():
    first = 'Thread 0x1 (most recent call first):\n  File "/a.py", line 1 in f\n'
    text = f"a line of the program's\n{first}\nCurrent thread 0x2 (most recent call first):\n{MAIN}\n"
    assert [str(frame) for frame in parsed(text)] == [AT]


@pytest.fixture
def started(tmp_path):
    """Starts Python programs that write standard error to a log, and ends them after the test."""
    processes = []

    def start(code, name="stderr.log"):
        with (tmp_path / name).open("ab") as log:
            process = subprocess.Popen([sys.executable, "-S", "-c", code], stderr=log, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout.readline() == b"ready\n"
        return psutil.Process(process.pid)

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


ANSWERS = f"import faulthandler; faulthandler.register({STACK_SIGNAL}, file=2, all_threads=True)\n"
READY = "import time; print('ready', flush=True)\n"


def test_process_in_an_endless_loop_reports_its_stack(started, tmp_path):
    dead = started(f"{ANSWERS}def spin():\n    print('ready', flush=True)\n    while True: pass\nspin()")
    hang = look([dead], tmp_path / "stderr.log")
    assert hang.kind == "user code"
    assert re.fullmatch(r"user code at <string>:[34] in spin", hang.summary)
    assert hang.as_json()["processes"][0]["stack"][-1] == "<string>:5 in <module>"


@pytest.mark.parametrize("host", ["another", os.uname().nodename])
def test_process_that_cannot_be_signalled_reports_its_stack_through_a_file(started, tmp_path, host):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "stderr.log").touch()
    spec = json.dumps({"trial": 1, "nonce": "", "folder": str(tmp_path), "host": host})
    code = f"import json, sys\nsys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    code += "from autotune.harness import protocol, stack_requests"
    code += f"\nstack_requests.answer_by_file(protocol.Spec(**json.loads({spec!r})))"
    process = started(f"{code}\n{ANSWERS}{READY}time.sleep(600)", "of srun")
    hang = look([process], tmp_path / "stderr.log")
    assert re.fullmatch(r"user code at <string>:\d+ in <module>", hang.summary)
    assert [each["pid"] for each in hang.as_json()["processes"]] == [process.pid]


@pytest.mark.parametrize("text", ["not an answer\n", '{"host": "n1"}\n', "[]\n"])
def test_file_that_is_no_answer_to_a_request_for_stacks_is_ignored(tmp_path, text):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "stderr.log").touch()
    (tmp_path / "scratch" / "stack.n1.7.txt").write_text(text)
    assert look([], tmp_path / "stderr.log").summary == "no process of the trial is left"


def test_answer_to_a_request_for_stacks_that_cannot_be_read_is_ignored(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "stderr.log").touch()
    (tmp_path / "scratch" / "stack.n1.7.txt").symlink_to("gone")
    assert look([], tmp_path / "stderr.log").summary == "no process of the trial is left"


def test_process_with_its_stderr_in_the_local_log_starts_no_thread(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "stderr.log").touch()
    monkeypatch.setattr(stack_requests.os, "fstat", lambda _: os.stat(tmp_path / "stderr.log"))
    stack_requests.answer_by_file(Spec(trial=1, nonce="", folder=str(tmp_path), host=os.uname().nodename))
    stack_requests.answer_by_file(Spec(trial=1, nonce="", folder=str(tmp_path)))  # a real run
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_process_without_the_handler_is_not_signalled(started, tmp_path):
    plain = started(f"{READY}time.sleep(600)")
    hang = look([plain], tmp_path / "stderr.log")
    assert hang.kind == "unknown"
    time.sleep(0.1)
    assert plain.is_running()
    assert plain.status() != psutil.STATUS_ZOMBIE


def test_process_that_has_closed_its_stderr_is_still_named(started, tmp_path):
    silent = started(f"{ANSWERS}import os; os.close(2)\n{READY}time.sleep(600)")
    assert f"(process {silent.pid} " in look([silent], tmp_path / "stderr.log").summary


def test_no_stack_is_written_to_a_file_outside_the_trial(started, tmp_path):
    elsewhere = started(f"{ANSWERS}{READY}time.sleep(600)", "the user's own")
    (tmp_path / "stderr.log").touch()
    assert look([elsewhere], tmp_path / "stderr.log").kind == "unknown"
    time.sleep(0.1)
    assert (tmp_path / "the user's own").read_bytes() == b""


@pytest.mark.parametrize(("function", "words"), [("nfs_wait", "nfs_wait"), ("0", "the kernel"), ("", "the kernel")])
def test_function_that_the_kernel_hides_is_not_named(tmp_path, monkeypatch, function, words):
    (tmp_path / "wchan").write_text(function)
    monkeypatch.setattr(hangs, "Path", lambda _: tmp_path / "wchan")
    assert hangs._in_words(7, psutil.STATUS_DISK_SLEEP) == f"disk-sleep in {words}"
