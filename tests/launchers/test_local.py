"""The local launcher: the contract of all launchers, and what it guarantees beyond that."""

import ast
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.harness import protocol
from autotune.harness.protocol import MARK_VARIABLE
from autotune.launchers.base import Launcher
from autotune.launchers.local import LocalLauncher, _prepare, signals_held
from tests.support.launcher_contract import (
    SHORT,
    SharedLauncherContract,
    a_launch,
    is_alive,
    marked_processes,
    wait,
    wait_for,
)
from tests.support.stub_programs import IGNORES_SIGTERM, program
from tests.support.waiting import wait_until

TUNER = """
import sys, time
from pathlib import Path
from autotune.launchers.local import LocalLauncher
from tests.support.launcher_contract import a_launch
running = LocalLauncher().start(a_launch(Path(sys.argv[1]), sys.argv[2:]))
while True:
    running.poll(); time.sleep(0.02)
"""


class TestLocalLauncher(SharedLauncherContract):
    @pytest.fixture(scope="class")
    @classmethod
    def launcher(cls, study: Path) -> Iterator[Launcher]:
        made = LocalLauncher(SHORT)
        yield made
        made.close()

    def test_child_that_cleared_its_environment_is_ended(self, launcher, folder):
        body = f"child = spawn({IGNORES_SIGTERM!r}, start_new_session=True, env={{}}, stdout=subprocess.PIPE)\n"
        body += "child.stdout.readline(); result(detected={'child': child.pid}); time.sleep(600)"
        ended = wait(launcher.start(a_launch(folder, program(body))))
        assert not is_alive(ended.results[0].detected["child"])

    def test_program_starts_with_default_signal_handling(self, launcher, folder):
        launch = a_launch(folder, ["sh", "-c", "yes | head -n 1 > /dev/null; trap > /dev/null; exit 7"])
        ended = wait(launcher.start(launch))
        assert ended.exit_code == 7
        assert "Broken pipe" not in ended.evidence["log_tail"]


@pytest.fixture
def launcher(study):
    made = LocalLauncher(SHORT)
    yield made
    made.close()
    assert not marked_processes(study)


def killed_tuner(folder: Path, body: str) -> list[int]:
    """Runs a tuner with one trial, kills it, and returns the process ids that the trial wrote down."""
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(folder), *program(body)])
    pids = [int(pid) for pid in wait_for(folder / "pids").split()]
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    return pids


def test_program_ends_when_the_tuner_is_killed(folder):
    body = "open('pids', 'w').write(str(os.getpid())); os.rename('pids', folder + '/pids'); time.sleep(600)"
    (pid,) = killed_tuner(folder, body)
    wait_until(lambda: not marked_processes(folder.parent.parent), "the end of the supervisor")  # it ends the program first
    assert not is_alive(pid)


def test_sweep_ends_processes_of_a_killed_tuner_but_not_of_other_studies(launcher, folder, tmp_path):
    body = f"""
child = spawn({IGNORES_SIGTERM!r}, start_new_session=True, stdout=subprocess.PIPE); child.stdout.readline()
open('pids', 'w').write(str(child.pid)); os.rename('pids', folder + '/pids'); time.sleep(600)
"""
    (pid,) = killed_tuner(folder, body)
    assert is_alive(pid)
    assert launcher.sweep(folder.parent.parent.with_name("stud")) == []
    assert is_alive(pid)
    lines = launcher.sweep(folder.parent.parent)
    assert any(f"process {pid} (" in line for line in lines)
    assert not is_alive(pid)


def test_soft_limit_of_open_files_is_raised(launcher, folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, most), hard))
    try:
        body = "import resource; result(detected={'soft': resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
        ended = wait(launcher.start(a_launch(folder, program(body))))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ended.results[0].detected["soft"] == most


SWEEPER = """
import sys
from pathlib import Path
from autotune.launchers.local import LocalLauncher
launcher = LocalLauncher()
print(launcher.sweep(Path(sys.argv[1])))
launcher.close()
"""


def test_sweep_never_ends_the_tuner_itself(study):
    marked = {**os.environ, MARK_VARIABLE: f"{study}:7"}  # as if the tuner ran within a trial of the study
    other = subprocess.Popen(["sleep", "600"], env=marked)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", SWEEPER, str(study)], env=marked, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        other.kill()
        other.wait()
    assert ended.returncode == 0, ended.stderr
    (line,) = ast.literal_eval(ended.stdout)
    assert line.startswith(f"ended process {other.pid} (")


def test_files_of_an_earlier_pass_of_explain_are_removed(launcher, folder):
    names = ("explain.json", "explained.lines.rank1.json", "trace.rank1.json.gz")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text('{"step": 3}')
    wait(launcher.start(a_launch(folder, program("result()"))))
    assert not [name for name in names if (folder / name).exists()]


def test_setting_the_system_clock_does_not_shift_the_times_of_a_trial(folder, monkeypatch):
    _prepare(a_launch(folder, []))
    spec = protocol.read_spec(str(folder / protocol.SPEC_FILE))
    monkeypatch.setattr(protocol, "time", SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic))
    assert protocol.clock_offset_s(spec) == 0.0


def test_a_signal_that_was_delayed_is_not_lost_if_an_error_occurs() -> None:
    def fail() -> None:
        with signals_held():
            os.kill(os.getpid(), signal.SIGINT)
            raise OSError("the node is lost")

    with pytest.raises(KeyboardInterrupt):
        fail()
