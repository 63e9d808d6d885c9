"""Runs trials as processes on this machine, each in its own session, under one supervisor process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import AutotuneError, BadInput
from autotune.harness import protocol
from autotune.harness.cores import read
from autotune.launchers import hangs, process_tree, shared_memory
from autotune.launchers.base import Cause, Ended, Launch, Launcher, Running, Slot
from autotune.launchers.environment import SERVER, is_mark_of, mark_of, study_of, trial_environment
from autotune.launchers.injection import AGAIN_S, LATE_S, why_shut_out, with_harness
from autotune.launchers.progress_file import ProgressFile
from autotune.launchers.rank_results import RankResults
from autotune.launchers.supervision import NotForked, SupervisorLost, SupervisorProcess
from autotune.launchers.user_files import UserFiles
from autotune.launchers.warm import WarmServer
from autotune.masking import Secrets
from autotune.monitors import host, logs
from autotune.plain_text import shortened
from autotune.process_ends import TASK_FAILED, reports_before, signal_name

INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORTS_BYTES = 256 << 10  # this much of the log's end is searched for torchrun's reports
LOG_S = 2.0  # seconds between two searches of a running trial's log for srun's report of a failed task
MAX_SUPERVISORS = 5  # if a trial's start has failed this many times because the supervisor was lost, no further try is made
STUCK_S = 10.0  # the supervisor is killed if a trial has not ended this many seconds after the last grace period


@dataclass(frozen=True, kw_only=True)
class Graces:
    """Grace periods: how long the launcher waits before it acts.

    Attributes:
        ranks_s: wait for the other ranks' results after the first result, or after srun has reported a failed task.
        leave_s: wait for the processes to exit once every result is there, before SIGTERM.
        orphans_s: wait for results of processes that still run after the first process has exited.
        terminate_s: wait after SIGTERM, before SIGKILL.
        kill_s: wait after SIGKILL, before the launcher reports that it could not end a process.
    """

    ranks_s: float = 15.0
    leave_s: float = 2.0
    orphans_s: float = 2.0
    terminate_s: float = 3.0
    kill_s: float = 5.0


class LocalLauncher(Launcher):
    """Starts trials through a supervisor process, which it starts when first needed and restarts if it was killed.

    Args:
        graces: the grace periods.
        slot: the part of the machine that its trials may use; None for all of it.
        made: files and folders that trials have made; all slots share this set.
        temporary: TMPDIR of the slot's trials, unless `Launch.env` sets it; None to leave TMPDIR unchanged.
    """

    def __init__(
        self,
        graces: Graces | None = None,
        *,
        slot: Slot | None = None,
        made: set[Path] | None = None,
        temporary: Path | None = None,
    ) -> None:
        self.slot, self._temporary_folder = slot, temporary
        self._graces = graces or Graces()
        self._supervisor: SupervisorProcess | None = None
        self._server = WarmServer()
        self._files = UserFiles(slot.name if slot else "", made)

    def start(self, launch: Launch) -> Running:
        """Starts the trial and returns it. See `Launcher.start`."""
        launch = self._on_slot(launch)
        if not os.path.isdir(launch.cwd):
            raise BadInput(f"cwd: no such folder, got {launch.cwd!r}. Start autotune from the folder the program runs in.")
        try:
            _prepare(launch)
        except OSError as error:
            problem = f"{launch.folder}: the trial's folder cannot be written ({error.strerror}). Give a folder: runs_dir=DIR."
            raise BadInput(problem) from error
        try:
            return self._start(launch)
        except (OSError, ValueError) as error:  # a NUL, a variable name with "=", or too many arguments for the system
            got = shortened(repr(launch.argv), 200)
            problem = f"COMMAND: cannot be passed on to a process, got {got} ({error}). Change the command."
            raise BadInput(problem) from error

    def sweep(self, study: Path) -> list[str]:
        """Ends all processes of this study; on a slot, only those of the slot. See `Launcher.sweep`.

        They are recognised by their mark, an environment variable (`mark_of`) that names the study, the slot and the trial.
        """
        name = self.slot.name if self.slot else None
        found = _left_by(study, name)
        lines = [f"ended process {process_tree.describe(process)}, left by an earlier run of this study" for process in found]
        _end_and_clean(lambda: _left_by(study, name), self._graces)
        shared_memory.remove_left(study)
        return lines

    def close(self) -> None:
        """Ends the supervisor, which ends all trials that still run. Then ends the process that guards the user's files."""
        if self._supervisor:
            self._supervisor.close()
        self._files.close()

    def _on_slot(self, launch: Launch) -> Launch:
        """Returns the launch with the name and the environment variables of this launcher's slot."""
        if self.slot is None:
            return launch
        env = {"TMPDIR": str(self._temporary_folder), **launch.env} if self._temporary_folder else dict(launch.env)
        if self.slot.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.slot.gpus)
        return dataclasses.replace(launch, env=env, slot=self.slot.name)

    def _start(self, launch: Launch) -> Running:
        study = study_of(launch.folder)
        for _ in range(MAX_SUPERVISORS):  # the supervisor may have been killed since the last trial, or just now
            supervisor = self._supervisor_of(study)
            with contextlib.suppress(SupervisorLost):
                server = self._server if launch.warm else None
                if server is not None:
                    server.prepare(launch, supervisor)
                return LocalRunning(launch, self._graces, supervisor, files=self._files, server=server)
            _end_and_clean(lambda: _left_by(study, launch.slot), self._graces)
        raise AutotuneError(f"the process that watches over the trials cannot be kept running: it was {supervisor.end}")

    def _supervisor_of(self, study: Path) -> SupervisorProcess:
        if self._supervisor is None or self._supervisor.end is not None or not self._supervisor.close.alive:
            graces = self._graces
            try:
                name, cores = (self.slot.name, self.slot.cores) if self.slot else ("", ())
                self._supervisor = SupervisorProcess(
                    study, terminate_s=graces.terminate_s, kill_s=graces.kill_s, slot=name, cores=cores
                )
            except OSError as error:
                raise AutotuneError(f"the process that watches over the trials cannot be started ({error})") from error
        return self._supervisor


class LocalRunning(Running):
    """A trial running on this machine.

    Args:
        launch: what to start; its folder has been prepared.
        graces: the grace periods.
        supervisor: the trial's parent process.
        files: guards the user's files during the study's trials.
        server: warm server, already prepared, that forks the trial where possible; None for a fresh start.
    """

    def __init__(
        self,
        launch: Launch,
        graces: Graces,
        supervisor: SupervisorProcess,
        *,
        files: UserFiles,
        server: WarmServer | None = None,
    ) -> None:
        self._launch, self._graces, self._supervisor = launch, graces, supervisor
        self._folder = launch.folder.resolve()
        self._environment = trial_environment(launch)
        self._mark = self._environment[protocol.MARK_VARIABLE]
        self._progress = ProgressFile(self._folder / protocol.PROGRESS_FILE)
        self._results = RankResults(self._folder, launch.spec)
        self._files = files
        self._oom_kills_before = host.oom_kills()
        self._seen: dict[int, float] = {}  # processes seen by the supervisor: id -> created, seconds since the epoch
        self._own_exit: int | None = None  # Popen.returncode of the first process; None while it runs, or if we signalled it
        self._first_result_s: float | None = None
        self._exited_s: float | None = None
        self._is_gone = self._is_signalled = self._is_warm = False
        self._cause: Cause | None = None
        self._cause_s = self._leave_s = 0.0
        self._why: dict[str, object] = {}
        self._problems: list[str] = []
        self._ended: Ended | None = None
        self._server = server
        self._started_s = time.monotonic()
        self._next_search_s, self._next_log_s = self._started_s + LATE_S, self._started_s
        files.begin(launch.argv, launch.cwd, self._folder)
        try:
            self._start()
        except BaseException:
            files.end()
            raise

    def _start(self) -> None:
        launch, server = self._launch, self._server
        what: dict[str, Any] = {"cwd": launch.cwd, "env": self._environment, "folder": self._folder}
        if server is not None and server.mark:
            try:
                self._supervisor.start(self._mark, argv=launch.argv, server=server.mark, **what)
            except NotForked as error:
                server.give_up(f"the warm server did not fork: {error}")
            else:
                self._is_warm = True
                if server.why_less:
                    self._why["why_less"] = server.why_less
                return
        if server is not None:
            self._why["why_fresh"] = server.why_not
        self._supervisor.start(self._mark, argv=with_harness(launch.argv), **what)

    def poll(self) -> Ended | None:
        """See `Running.poll`."""
        if self._ended is None:
            for name in (protocol.STDOUT_FILE, protocol.STDERR_FILE):
                logs.bound(self._folder / name)
            now_s = time.monotonic()
            for message in self._supervisor.messages(self._mark):
                self._hear(message, now_s)
            if self._cause is None:
                self._watch(now_s)
            elif now_s - self._cause_s < self._leave_s:
                self._results.collect()  # ranks may still add to their results while they exit
            if not self._is_gone:
                self._look_after_supervisor(now_s)
            if self._cause is not None and self._is_gone:
                shared_memory.forget(self._folder)
                self._ended = self._report()
        return self._ended

    def progress(self) -> protocol.Progress | None:
        """See `Running.progress`."""
        self._progress.read()
        return self._progress.newest

    def request_stop(self, reason: str) -> None:
        """See `Running.request_stop`."""
        with signals_held():
            if self.poll() is None and self._cause is None:
                self._why["stop_reason"] = reason
                self._conclude("stopped")
            elif self._ended is None and self._leave_s:
                self._leave_s = 0.0
                self._supervisor.end_trial(self._mark, after_s=0.0)

    def stop(self, reason: str) -> None:
        """See `Running.stop`. Ctrl-C and other interrupting signals are delayed until the trial has ended."""
        with signals_held():
            self.request_stop(reason)
            while self.poll() is None:  # bounded by the grace periods
                self._supervisor.wait(0.05)

    def _hear(self, message: dict[str, Any], now_s: float) -> None:
        """Handles one message of the supervisor about the trial's processes."""
        match message["is"]:
            case "seen":
                self._seen.update((pid, created_s) for pid, created_s in message["processes"])
                shared_memory.note(self._folder, message["processes"])
            case "exited":
                self._exited_s = now_s
                self._own_exit = message["status"] if message["is_own"] else None
            case "gone":
                self._is_gone, self._is_signalled = True, message["is_signalled"]
                self._problems += [f"could not be ended: {process}" for process in message["left"]]

    def _watch(self, now_s: float) -> None:
        """Checks whether the trial is over, and if so records the cause."""
        self._progress.read()
        if self._results.missing or self._exited_s is not None:
            self._results.refresh()
        self._results.collect()  # called after the messages were read, to see all that a process wrote before it exited
        if self._first_result_s is None and (self._results.by_rank or self._has_lost_task(now_s)):
            self._first_result_s = now_s
        if self._results.is_complete:
            self._conclude("result", leave_s=self._graces.leave_s)
        elif self._is_rest_late(now_s):
            if missing := self._results.missing:
                self._problems.append(f"no result from rank {', '.join(map(str, missing[:8]))}")
            self._conclude("result" if self._results.by_rank else "exit")
        elif self._is_gone and self._is_signalled:  # the supervisor has ended the trial although we did not request it
            self._lose("terminated from outside")
        elif self._exited_s is not None and self._are_orphans_done(now_s):
            self._conclude("result" if self._results.by_rank else "exit")
        elif limit := hangs.passed_limit(self._launch.deadlines, self._progress, started_s=self._started_s, now_s=now_s):
            self._why["deadline"] = limit
            if not hangs.is_moving(self._progress, now_s=now_s):
                self._why["hang"] = hangs.look(self._members(), self._folder / protocol.STDERR_FILE).as_json()
            self._conclude("deadline")
        elif self._progress.newest is None and now_s > self._next_search_s and not self._is_warm:
            self._next_search_s = now_s + AGAIN_S
            if why := why_shut_out(self._members()):
                self._why["shut_out"] = why
                self._conclude("deadline")

    def _look_after_supervisor(self, now_s: float) -> None:
        """Ends the trial without the supervisor if the supervisor was killed or does not end the trial in time."""
        graces = self._graces
        patience_s = self._leave_s + graces.terminate_s + graces.kill_s + STUCK_S
        if self._cause is not None and now_s - self._cause_s > patience_s:
            self._supervisor.kill()
        if self._supervisor.end is None:
            return
        if self._cause is None:
            self._lose(self._supervisor.end)
        self._problems += [f"could not be ended: {process}" for process in _end_and_clean(self._orphans, graces, self._seen)]
        self._is_gone = self._is_signalled = True

    def _members(self) -> list[psutil.Process]:
        """Returns the trial's living processes: those with its mark, those that the supervisor has seen, and descendants."""
        return process_tree.members(lambda mark: mark == self._mark, process_tree.still_there(self._seen))

    def _orphans(self) -> list[psutil.Process]:
        """Returns the trial's living processes after its supervisor has exited.

        A trial that a warm server forked has the server's mark in /proc, so trial and server cannot be distinguished. In this
        case, all processes with the server's mark are returned as well, including the server.
        """
        marks = {self._mark, mark_of(study_of(self._folder), SERVER, self._launch.slot)} if self._is_warm else {self._mark}
        return process_tree.members(lambda mark: mark in marks, process_tree.still_there(self._seen))

    def _lose(self, how: str) -> None:
        """Records that the trial ended because its supervisor was `how`, such as "killed by SIGKILL"."""
        self._cause = "lost"
        self._why["stop_reason"] = (
            f"the supervisor, which watches over the trial's processes, was {how}; the trial ended with it"
        )

    def _has_lost_task(self, now_s: float) -> bool:
        """Whether srun has logged a failed task. srun itself may run on, and other ranks may wait for that task forever."""
        if now_s < self._next_log_s:
            return False
        self._next_log_s = now_s + LOG_S
        return bool(TASK_FAILED.search(logs.tail(self._folder / protocol.STDERR_FILE)))

    def _is_rest_late(self, now_s: float) -> bool:
        """Whether the wait for the other ranks' results is over. It begins with the first result or a failed task."""
        return self._first_result_s is not None and now_s - self._first_result_s > self._graces.ranks_s

    def _are_orphans_done(self, now_s: float) -> bool:
        """Whether processes that still run after the exit of the first process have had enough time to write a result."""
        return self._is_gone or now_s - (self._exited_s or now_s) > self._graces.orphans_s

    def _conclude(self, cause: Cause, leave_s: float = 0.0) -> None:
        """Records why the trial is over, and requests that processes still running after `leave_s` be ended."""
        self._cause, self._cause_s, self._leave_s = cause, time.monotonic(), leave_s
        if not self._is_gone:
            self._supervisor.end_trial(self._mark, after_s=leave_s)

    def _report(self) -> Ended:
        self._progress.read()
        if not self._is_signalled:  # a result written after our SIGTERM describes the SIGTERM, not the trial
            self._results.collect()
        own = self._own_exit
        evidence = self._evidence()
        spared_s = self._server.start_s - float(evidence["ready_s"] or 0.0) if self._is_warm and self._server else 0.0
        return Ended(
            exit_code=own if own is not None and own >= 0 else None,
            signal=signal_name(-own) if own is not None and own < 0 else None,
            cause=self._cause or "exit",
            phase=self._progress.phase,
            results=[self._results.by_rank[rank] for rank in sorted(self._results.by_rank)],
            problems=self._results.problems + self._problems,
            seconds=time.monotonic() - self._started_s,
            evidence=evidence,
            start="warm" if self._is_warm else "fresh",
            spared_s=max(0.0, spared_s),
        )

    def _evidence(self) -> dict[str, Any]:
        secrets = Secrets.known(self._environment)
        oom_kills = host.oom_kills()
        is_counted = oom_kills is not None and self._oom_kills_before is not None
        files = self._files.end()
        newest, ready_s = self._progress.newest, self._progress.entered_s.get("init")
        log = self._folder / protocol.STDERR_FILE
        tail = logs.tail(log)
        return {
            "ready_s": None if ready_s is None else ready_s - self._started_s,
            "log_tail": secrets.text(reports_before(logs.tail(log, REPORTS_BYTES), tail) + tail),
            "stdout_tail": secrets.text(logs.tail(self._folder / protocol.STDOUT_FILE)),
            "oom_kills": (oom_kills or 0) - (self._oom_kills_before or 0) if is_counted else None,
            "is_harness_seen": newest is not None or bool(self._results.by_rank),
            "num_steps": newest.step if newest else 0,
            "files_left": files.left,
            "files_new": files.new,
            "files_kept": files.kept,
            "files_aside": files.aside,
            "files_unguarded": files.unguarded,
            "files_loaded": files.loaded,
            "files_continued": files.continued,
            **self._why,
        }


def _prepare(launch: Launch) -> None:
    """Resets the trial's folder for a new attempt. Afterwards, its only protocol files are the spec and empty logs."""
    launch.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for pattern in ("result.rank*.json", "*.tmp", "loader*.bin", "peer*.json", "explain*.json", "trace.rank*"):
        for file in launch.folder.glob(pattern):
            file.unlink()
    files = (protocol.KEPT_FILE, protocol.OWN_FILE, protocol.SPARED_FILE, protocol.MADE_FILE, protocol.LOADED_FILE)
    for name in (*files, protocol.PROGRESS_FILE, protocol.STOP_FILE, protocol.STDOUT_FILE, protocol.STDERR_FILE):
        (launch.folder / name).unlink(missing_ok=True)
    for name in (protocol.STDOUT_FILE, protocol.STDERR_FILE):
        (launch.folder / name).touch(mode=0o600)
    shutil.rmtree(launch.folder / protocol.SCRATCH, ignore_errors=True)
    (launch.folder / protocol.SCRATCH).mkdir(mode=0o700)
    clock: dict[str, Any] = {"boot_id": read(protocol.BOOT_ID), "epoch_s": time.time() - time.monotonic()}
    here = dataclasses.replace(launch.spec, host=platform.node(), **clock)
    protocol.write_json(str(launch.folder / protocol.SPEC_FILE), here)


def _left_by(study: Path, slot: str | None = None) -> list[psutil.Process]:
    """Returns the living processes of a study, or only those of one of its slots."""
    return process_tree.members(lambda mark: is_mark_of(study, mark, slot))


def _end_and_clean(
    find: Callable[[], list[psutil.Process]], graces: Graces, seen: Mapping[int, float] | None = None
) -> list[str]:
    """Ends processes that have no supervisor and removes their shared memory; returns a text for each process still alive.

    Args:
        find: returns those of the processes to end that are alive now.
        graces: the grace periods after the signals.
        seen: further processes whose shared memory is removed, even if they have exited: id -> created, s since the epoch.
    """
    created_s = dict(seen or {})

    def found() -> list[psutil.Process]:
        processes = find()
        created_s.update({process.pid: process.create_time() for process in processes})
        return processes

    left = process_tree.end(found, terminate_s=graces.terminate_s, kill_s=graces.kill_s)
    shared_memory.remove(created_s)
    return [process_tree.describe(process) for process in left]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delays interrupting signals until the context ends. Does nothing outside the main thread, which alone gets signals."""
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda heard, _: held.append(heard)) for number in INTERRUPTING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for heard in dict.fromkeys(held):  # also after an error
            signal.raise_signal(heard)
