"""A whole study in seconds: the real command line, tuner, supervisor and processes, with a stub program."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from autotune.launchers.environment import own_environment
from tests.support.launcher_contract import marked_processes
from tests.support.stub_programs import PRELUDE
from tests.support.waiting import PATIENCE_S, wait_until

# `answer` gives the baseline twice the rate of the others, so that the finals are short.
# `family` starts processes that are hard to end, and writes their ids to the file `pids` in the trial's folder.
FAMILY = """
def answer():
    result(throughput_per_s=640.0 if spec["trial"] == 0 or not spec["knobs"] else 320.0)

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP

def daemon():  # two forks, its own session, an empty environment, ignores SIGTERM
    code = "import os, sys\\nos.setsid()\\npid = os.fork()\\nif pid: print(pid); sys.exit()\\n"
    code += "null = os.open(os.devnull, os.O_RDWR)\\n[os.dup2(null, n) for n in range(3)]\\n"
    code += "os.execve(sys.executable, [sys.executable, '-S', '-c', sys.argv[1]], {})"
    return int(subprocess.run([sys.executable, "-S", "-c", code, DEAF], stdout=subprocess.PIPE).stdout)

def family():
    child = spawn(SLEEP)
    stopped = spawn(SLEEP); os.kill(stopped.pid, signal.SIGSTOP)
    deaf = spawn(DEAF, start_new_session=True)
    with open(folder + "/pids.tmp2", "w") as file:
        file.write(" ".join(map(str, [os.getpid(), child.pid, stopped.pid, deaf.pid, daemon()])))
    time.sleep(0.3)  # until they ignore SIGTERM
    os.rename(folder + "/pids.tmp2", folder + "/pids")
"""


class StubStudy:
    """`autotune run` on a stub program, in its own folder.

    Args:
        cwd: the folder; the study is `runs/s` in it.
        body: the program's code after PRELUDE.
        overrides: KEY=VALUE words in addition to those that make the study short.
    """

    def __init__(self, cwd: Path, body: str, *overrides: str) -> None:
        self.cwd, self.path = cwd, cwd / "runs" / "s"
        (cwd / "program.py").write_text(f"{PRELUDE}{FAMILY}\n{body}")
        quick = ["study.name=s", "device.kind=cpu", "tracker.uri=none", "study.budget.trials=2", "study.budget.minutes=1"]
        self.argv = [sys.executable, "-m", "autotune", "run", *quick, *overrides, "--", sys.executable, "program.py"]
        self.environment = {**own_environment(), "NO_COLOR": "1", "COLUMNS": "100"}
        self.process: subprocess.Popen[str] | None = None

    def start(self, **how: object) -> subprocess.Popen[str]:
        """Starts the tuner."""
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **how}
        self.process = subprocess.Popen(self.argv, cwd=self.cwd, env=self.environment, text=True, **how)
        return self.process

    def wait(self) -> tuple[int, str]:
        """Waits until the tuner has exited; returns its exit code and output."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output

    def wait_for(self, pattern: str) -> Path:
        """Waits for a file below the study's folder and returns it."""
        return wait_until(lambda: next(iter(self.path.glob(pattern)), None), f"{pattern} in {self.path}")

    @property
    def supervisor(self) -> psutil.Process:
        """Returns the supervisor of the study."""

        def found():
            return next((p for p in self.processes() if "autotune.launchers.supervisor" in p.cmdline()), None)

        return wait_until(found, "a supervisor")

    def processes(self) -> list[psutil.Process]:
        """Returns all processes of the study except the tuner."""
        return marked_processes(self.path)

    def summary(self) -> dict:
        return json.loads((self.path / "summary.json").read_text())

    def end(self) -> None:
        """Kills all remaining processes."""
        if self.process and self.process.poll() is None:
            self.process.kill()
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        if self.process:
            self.process.communicate()


def pids_in(file: Path) -> list[int]:
    """Returns the process ids that a program wrote to a file."""
    return [int(pid) for pid in file.read_text().split()]
