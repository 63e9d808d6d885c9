"""A short study that tests can kill often: the real command line in its own processes, with a stub program.

The program implements the protocol without torch and trains nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from autotune.harness.protocol import MARK_VARIABLE
from autotune.launchers.environment import own_environment
from autotune.records import Outcome, TrialRecord
from autotune.run_dir import StudyFolder
from tests.support.stub_programs import PRELUDE
from tests.support.waiting import comes

PROGRAM = """
progress("steady", 5)
time.sleep(float(sys.argv[1]))
rate = 300.0 * (1.5 if spec["knobs"].get("precision.amp") == "bf16" else 1.0)
wobble = [1.0, 0.99, 1.01, 0.995, 1.005, 1.0]
window = {"steps": 20, "seconds": 2.0, "samples": 640.0, "rate_per_s": rate, "block_rates_per_s": [rate * w for w in wobble],
          "half_width_frac": 0.01, "is_steady": True, "reason": ""}
observed = {"loader.batch_size": 32, "loader.num_workers": 0, "precision.amp": "off", "layout.channels_last": False,
            "threads.intra": 2}
result(window=window, throughput_per_s=rate, unit="samples", target=[], observed=observed, phases_s={"spawn": 0.1},
       facts={"torch": "2.14.1", "device": "cpu", "isa": ["amx_bf16"]})
"""
OPTIONS = ("tracker.uri=none", "device.kind=cpu", "study.name=s")


class QuickStudy:
    """One study in its own folder.

    Attributes:
        folder: the study's folder.
        cwd: working directory of the commands.

    Args:
        cwd: working directory of the commands.
        trial_s: seconds that a trial's steady phase takes.
        program: source of the program, after PRELUDE.
        runs: the runs folder.
        flags: flags of the interpreter. With "-S", the harness is not loaded, and the program implements the protocol itself.
        environment: additional variables of all processes.
        module: the module that runs autotune's command line.
    """

    def __init__(
        self,
        cwd: Path,
        *,
        trial_s: float = 0.2,
        program: str = PROGRAM,
        runs: str = "runs",
        flags: Sequence[str] = ("-S",),
        environment: Mapping[str, str] | None = None,
        module: str = "autotune",
    ) -> None:
        self.cwd, self._trial_s, self._runs, self._flags, self._module = cwd, trial_s, runs, flags, module
        self.folder = StudyFolder(cwd / runs / "s")
        self.edit(program)
        self._environment = {**own_environment(), "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", **(environment or {})}

    def edit(self, program: str) -> None:
        """Replaces the program's source."""
        (self.cwd / "train.py").write_text(f"{PRELUDE}\n{program}", encoding="utf-8")

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts the study, with `words` as overrides."""
        command = ["--", sys.executable, *self._flags, "train.py", str(self._trial_s)]
        return self._popen(["run", *OPTIONS, *words, f"runs_dir={self._runs}", *command])

    def resume(self, *words: str) -> subprocess.Popen[str]:
        """Resumes the study."""
        return self._popen(["resume", "s", *words, "--runs-dir", self._runs])

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs another command on the study."""
        process = self._popen([*words, "--runs-dir", self._runs])
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def shown(self) -> dict[str, Any]:
        """Returns what `autotune show --json` prints."""
        return dict(json.loads(self.say("show", "s", "--json").stdout))

    def wait_for_trial(self, number: int, process: subprocess.Popen[str], *, is_started: bool = True) -> None:
        """Waits until a trial has started or, if not `is_started`, until it has ended."""
        file = self.folder.trial_path(number) / ("progress.jsonl" if is_started else "trial.json")
        deadline = time.monotonic() + 60
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.terminate()
                raise AssertionError(f"trial {number} never came: {process.communicate(timeout=60)}")
            time.sleep(0.01)

    def processes(self) -> list[psutil.Process]:
        """Returns the processes that carry the study's mark, or whose arguments contain the study's folder."""
        found = []
        for process in psutil.process_iter():
            try:
                is_marked = process.environ().get(MARK_VARIABLE, "").startswith(f"{self.folder.path.resolve()}:")
                is_told = str(self.folder.path.resolve()) in " ".join(process.cmdline())
            except (psutil.Error, OSError):
                continue
            if (is_marked or is_told) and process.pid != os.getpid():
                found.append(process)
        return found

    def none_is_left(self, *, within_s: float = 10.0) -> bool:
        """Returns whether every process of the study ends within `within_s`."""
        return comes(lambda: not self.processes(), within_s=within_s, every_s=0.1)

    def _popen(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module, *words],
            cwd=self.cwd,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a tuner with SIGKILL and waits until it has exited."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def measured(trials: list[TrialRecord]) -> list[tuple[object, ...]]:
    """Returns kind, round, repeats and changes of each finished trial. Equal entries mean that a trial was repeated."""
    over = [trial for trial in trials if trial.outcome is not Outcome.interrupted]
    return [(trial.kind, trial.round, trial.repeats, tuple(sorted(trial.changed.items()))) for trial in over]
