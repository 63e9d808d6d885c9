"""Trials as processes of this machine, one at a time, each in a session of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.errors import BadInput
from autotune.harness import protocol
from autotune.launchers import deadlines, process_tree
from autotune.launchers.base import Cause, Ended, Launch, Launcher, Running
from autotune.launchers.environment import inductor_cache, mark_of, trial_environment
from autotune.launchers.progress_file import ProgressFile
from autotune.launchers.rank_results import RankResults
from autotune.masking import Secrets
from autotune.monitors import host, logs
from autotune.monitors.nvml import MemoryGate

DOORWAY = Path(__file__).resolve().parent / "doorway.py"
MAX_NEW_FILES = 50  # of those a trial left in its working directory, named in the evidence


@dataclass(frozen=True, kw_only=True)
class Graces:
    """How long the launcher waits for what usually happens by itself.

    Attributes:
        ranks_s: for the other ranks' results, after the first.
        leave_s: for the processes to go once every result is there, before they are told to.
        orphans_s: for what the first process left running, after its end without a result.
        terminate_s: after SIGTERM, before SIGKILL.
        kill_s: after SIGKILL, before the launcher says that it could not end a process.
    """

    ranks_s: float = 15.0
    leave_s: float = 2.0
    orphans_s: float = 2.0
    terminate_s: float = 3.0
    kill_s: float = 5.0


class LocalLauncher(Launcher):
    """Starts trials as children of the tuner.

    A supervisor process (one per host and study, a subreaper, parent of all trials) will stand between the two later; until
    then `sweep` ends what a killed tuner left. The kernel sends the first process SIGTERM when the *thread* that called
    `start` ends, so `start` belongs to a thread that outlives the trial.

    Args:
        graces: how long to wait for what usually happens by itself.
        gate: lets a trial start only when the device's memory is free again; None without a device. When it stays taken the
            trial starts all the same (it may fit), and the evidence names who holds it.
    """

    def __init__(self, graces: Graces | None = None, gate: MemoryGate | None = None) -> None:
        self._graces, self._gate = graces or Graces(), gate

    def start(self, launch: Launch) -> Running:
        """Returns the trial, started. See `Launcher.start`."""
        if not os.path.isdir(launch.cwd):
            raise BadInput(f"cwd: no such folder, got {launch.cwd!r}. Start autotune from the folder the program runs in.")
        try:
            _prepare(launch)
        except OSError as error:
            problem = f"{launch.folder}: the trial's folder cannot be written ({error.strerror}). Give a folder: runs_dir=DIR."
            raise BadInput(problem) from error
        held = self._gate.wait() if self._gate else ""
        try:
            return LocalRunning(launch, self._graces, device_held=held)
        except (OSError, ValueError) as error:  # a NUL, a variable's name with "=", more arguments than the system takes
            problem = f"COMMAND: cannot be passed on to a process, got {launch.argv!r:.200} ({error}). Change the command."
            raise BadInput(problem) from error

    def sweep(self, study: Path) -> list[str]:
        """Ends every process that carries this study's mark. See `Launcher.sweep`."""
        prefix = mark_of(study, 0)[:-1]
        found = process_tree.members(None, lambda mark: mark.startswith(prefix) and mark[len(prefix) :].isdigit())
        lines = [f"ended process {process_tree.describe(process)}, left by an earlier run of this study" for process in found]
        process_tree.send(found, signal.SIGTERM)
        _, alive = psutil.wait_procs(found, timeout=self._graces.terminate_s)
        process_tree.send(alive, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=self._graces.kill_s)
        return lines


class LocalRunning(Running):
    """A trial under way on this machine.

    Args:
        launch: what to start; its folder is prepared.
        graces: how long to wait for what usually happens by itself.
        device_held: who holds the device's memory already; "" for nobody.
    """

    def __init__(self, launch: Launch, graces: Graces, *, device_held: str = "") -> None:
        self._launch, self._graces = launch, graces
        self._folder = launch.folder.resolve()
        self._environment = trial_environment(launch)
        self._mark = self._environment[protocol.MARK_VARIABLE]
        self._progress = ProgressFile(self._folder / protocol.PROGRESS_FILE)
        self._results = RankResults(self._folder, launch.spec)
        self._names_before = _names(launch.cwd)
        self._oom_kills_before = host.oom_kills()
        self._known: list[psutil.Process] = []
        self._own_exit: int | None = None  # as subprocess.returncode; stays None when the launcher's signals came first
        self._first_result_s: float | None = None
        self._exited_s: float | None = None
        self._signalled_s: float | None = None
        self._cause: Cause | None = None
        self._cause_s = self._leave_s = 0.0
        self._why = {"device_held": device_held} if device_held else {}
        self._problems: list[str] = []
        self._ended: Ended | None = None
        self._started_s = time.monotonic()
        self._process = self._start()

    def poll(self) -> Ended | None:
        """See `Running.poll`."""
        if self._ended is None and self._cause is None:
            self._watch(time.monotonic())
        if self._ended is None and self._cause is not None:
            self._end(time.monotonic())
        return self._ended

    def progress(self) -> protocol.Progress | None:
        """See `Running.progress`."""
        self._progress.read()
        return self._progress.newest

    def stop(self, reason: str) -> None:
        """See `Running.stop`."""
        if self._ended is None and self._cause is None:
            self._watch(time.monotonic())
        if self._cause is None:
            self._why["stop_reason"] = reason
            self._conclude("stopped")
        self._leave_s = 0.0
        while self.poll() is None:  # bounded by the graces
            time.sleep(0.02)

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-I", "-S", str(DOORWAY), str(os.getpid()), *self._launch.argv]
        with (
            (self._folder / protocol.STDOUT_FILE).open("wb") as stdout,
            (self._folder / protocol.STDERR_FILE).open("wb") as stderr,
        ):
            return subprocess.Popen(
                argv,
                cwd=self._launch.cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def _watch(self, now_s: float) -> None:
        """Looks whether the trial is over, and concludes if so."""
        has_exited = self._look_for_exit(now_s)  # before the results: whoever has gone writes no more
        self._progress.read()
        self._results.collect()
        if self._results.by_rank and self._first_result_s is None:
            self._first_result_s = now_s
        if self._results.is_complete:
            self._conclude("result", leave_s=self._graces.leave_s)
        elif self._is_rest_late(now_s):
            self._problems.append(f"no result from rank {', '.join(map(str, self._results.missing[:8]))}")
            self._conclude("result")
        elif has_exited and self._are_orphans_done(now_s):
            self._conclude("result" if self._results.by_rank else "exit")
        elif limit := deadlines.passed(self._launch.deadlines, self._progress, started_s=self._started_s, now_s=now_s):
            self._why["deadline"] = limit
            self._conclude("deadline")

    def _is_rest_late(self, now_s: float) -> bool:
        return self._first_result_s is not None and now_s - self._first_result_s > self._graces.ranks_s

    def _are_orphans_done(self, now_s: float) -> bool:
        """Whether nothing that the first process left running will still bring a result."""
        is_grace_over = now_s - (self._exited_s or now_s) > self._graces.orphans_s
        return is_grace_over or not self._members()

    def _conclude(self, cause: Cause, leave_s: float = 0.0) -> None:
        self._cause, self._cause_s, self._leave_s = cause, time.monotonic(), leave_s

    def _end(self, now_s: float) -> None:
        """Takes the next step towards an empty process tree; makes `Ended` when it is."""
        self._look_for_exit(now_s)
        alive = self._members()
        if not alive:
            self._ended = self._report()
        elif self._signalled_s is None:
            if now_s - self._cause_s >= self._leave_s:
                self._signalled_s = now_s
                process_tree.send(alive, signal.SIGTERM)
        elif now_s - self._signalled_s > self._graces.terminate_s + self._graces.kill_s:
            names = ", ".join(process_tree.describe(process) for process in alive)
            self._problems.append(f"could not be ended: {names}")
            self._ended = self._report()
        elif now_s - self._signalled_s > self._graces.terminate_s:
            process_tree.send(alive, signal.SIGKILL)

    def _members(self) -> list[psutil.Process]:
        self._known = process_tree.members(self._process.pid, lambda mark: mark == self._mark, self._known)
        return self._known

    def _look_for_exit(self, now_s: float) -> bool:
        """Whether the first process has ended. It is not reaped: until the end its id must stay ours."""
        if self._exited_s is None:
            try:
                end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped by somebody else in this process: the status is lost
                self._exited_s = now_s
                return True
            if end is not None:
                self._exited_s = now_s
                if self._signalled_s is None:
                    self._own_exit = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self._exited_s is not None

    def _report(self) -> Ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.1)
        self._progress.read()
        if self._signalled_s is None:  # what a process writes after our SIGTERM tells of the SIGTERM, not of the trial
            self._results.collect()
        own = self._own_exit
        ended = Ended(
            exit_code=own if own is not None and own >= 0 else None,
            signal=signal_name(-own) if own is not None and own < 0 else None,
            cause=self._cause or "exit",
            phase=self._progress.phase,
            results=[self._results.by_rank[rank] for rank in sorted(self._results.by_rank)],
            problems=self._results.problems + self._problems,
            seconds=time.monotonic() - self._started_s,
            evidence=self._evidence(),
        )
        for name in (protocol.STDOUT_FILE, protocol.STDERR_FILE):
            logs.shorten(self._folder / name)
        return ended

    def _evidence(self) -> dict[str, object]:
        secrets = Secrets.known(self._environment)
        oom_kills = host.oom_kills()
        is_counted = oom_kills is not None and self._oom_kills_before is not None
        newest = self._progress.newest
        return {
            "log_tail": secrets.text(logs.tail(self._folder / protocol.STDERR_FILE)),
            "stdout_tail": secrets.text(logs.tail(self._folder / protocol.STDOUT_FILE)),
            "oom_kills": (oom_kills or 0) - (self._oom_kills_before or 0) if is_counted else None,
            "is_harness_seen": newest is not None or bool(self._results.by_rank),
            "num_steps": newest.step if newest else 0,
            "files_left": sorted(_names(self._launch.cwd) - self._names_before)[:MAX_NEW_FILES],
            **self._why,
        }


def signal_name(number: int) -> str:
    """Returns "SIGSEGV" for 11, "signal 40" for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _prepare(launch: Launch) -> None:
    """Makes the trial's folder as a first attempt finds it: a spec and nothing else of the protocol."""
    launch.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for pattern in ("result.rank*.json", "*.tmp", "loader*.bin"):
        for file in launch.folder.glob(pattern):
            file.unlink()
    for name in (protocol.PROGRESS_FILE, protocol.STOP_FILE, protocol.STDOUT_FILE, protocol.STDERR_FILE):
        (launch.folder / name).unlink(missing_ok=True)
    shutil.rmtree(launch.folder / "scratch", ignore_errors=True)
    (launch.folder / "scratch").mkdir(mode=0o700)
    inductor_cache(launch.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    protocol.write_json(str(launch.folder / protocol.SPEC_FILE), launch.spec)


def _names(folder: str) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except OSError:
        return set()
