"""Runs the parent process of a study's trials on one host: `python -m autotune.launchers.supervisor FD TERMINATE_S KILL_S`.

The trials are children of this supervisor and not of the tuner, because a killed tuner could not end them. The supervisor has
its own session, so neither Ctrl-C nor a hangup reaches it. It is a subreaper, so it stays the ancestor of every process that a
trial starts. When the tuner exits, for whatever reason, the socket between tuner and supervisor closes. Then the supervisor
ends the trials, removes their shared memory and exits. While a trial is measured, the supervisor only reads the process list
once a second.

FD is the supervisor's end of a socket pair. TERMINATE_S and KILL_S are grace periods. Both sides write one JSON object per
line. "trial" and "server" are marks: each names a trial or a warm server (environment.mark_of). Messages are never stored,
because they contain environments with secrets.

    tuner       {"do": "start", "trial", "argv", "cwd", "env", "stdout", "stderr"}    starts a trial
                {"do": "serve", ...}                        starts a warm server (harness/warm_server.py). Its fields are
                                                            those of "start"; it is tracked and ended like a trial
                {"do": "start", ..., "server"}              starts a trial as a fork of this warm server
                {"do": "end", "trial", "after_s"}           SIGTERM after `after_s`, SIGKILL after a grace period
    supervisor  {"is": "started", "trial"}
                {"is": "refused", "trial", "why"}           the process cannot be started
                {"is": "ready", "trial", "why"}             a warm server is ready; if "why" is not "", it cannot be used
                {"is": "seen", "trial", "processes"}        new processes of the trial: [id, created (s since the epoch)] each
                {"is": "exited", "trial", "status", "is_own"}  the first process has exited: status as Popen.returncode,
                                                            is_own = whether it exited before any signal from here
                {"is": "gone", "trial", "left", "is_signalled"}  all processes have exited except "left", which would not end;
                                                            is_signalled = whether they were sent a signal from here
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autotune.launchers import process_tree, shared_memory
from autotune.launchers.descendants import Descendants

ENTRY_POINT = Path(__file__).resolve().parent / "entry_point.py"
PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 1.0  # pause between reads of the process list while a trial runs; a process that runs for less time may be missed
END_LOOK_S = 0.05  # pause between reads of the process list while a trial is being ended
READ_BYTES = 1 << 16
FORK_S = 5.0  # longest wait for a warm server to fork, which normally takes less than 10 ms


@dataclass(kw_only=True)
class Trial:
    """A running trial or warm server.

    Attributes:
        pid: id of the first process.
        ending: state of the shutdown (SIGTERM, SIGKILL).
        process: the first process, if the supervisor started it; None if a warm server forked it.
        link: the supervisor's end of the socket to a warm server; None for a trial.
        has_exited: whether the first process has exited.
        end_at_s: when to begin to end the trial, on the monotonic clock; None while it may run.
        num_reported: number of the trial's processes that have been reported to the tuner.
    """

    pid: int
    ending: process_tree.Ending
    process: subprocess.Popen[bytes] | None = None
    link: socket.socket | None = None
    has_exited: bool = False
    end_at_s: float | None = None
    num_reported: int = 0


class Supervisor:
    """The supervisor program: its state, and its main loop in `run`.

    Args:
        tuner: the socket; it closes when the tuner exits, for whatever reason.
        terminate_s: grace period after SIGTERM, before SIGKILL.
        kill_s: grace period after SIGKILL, before a process is reported as left.
    """

    def __init__(self, tuner: socket.socket, *, terminate_s: float, kill_s: float) -> None:
        self._tuner = tuner
        self._terminate_s, self._kill_s = terminate_s, kill_s
        self._trials: dict[str, Trial] = {}
        self._descendants = Descendants()
        self._incoming, self._outgoing = b"", b""
        self._is_leaving = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Handles messages and processes until the tuner is gone and no trial is left."""
        wake, woken = socket.socketpair()
        for end in (wake, woken, self._tuner):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):  # SIG_IGN would be inherited by the trials
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        with self._selector as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._tuner, selectors.EVENT_READ)
            while self._trials or not self._is_leaving:
                for key, _ in selector.select(self._pause_s()):
                    if key.fileobj is wake:
                        wake.recv(READ_BYTES)
                    elif key.data is not None:
                        self._hear_server(key.data)
                    elif not self._hear():
                        selector.unregister(self._tuner)
                        self._leave()
                self._reap()
                self._step()
                self._flush()

    def _pause_s(self) -> float | None:
        if any(trial.has_exited or trial.end_at_s is not None for trial in self._trials.values()):
            return END_LOOK_S
        return LOOK_S if self._trials else None

    def _leave(self) -> None:
        self._is_leaving = True
        for trial in self._trials.values():
            trial.end_at_s = 0.0

    # Messages

    def _hear(self) -> bool:
        """Handles the tuner's messages; returns whether the tuner is still there."""
        try:
            chunk = self._tuner.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return bool(chunk)

    def _say(self, what: str, mark: str, **more: Any) -> None:
        self._outgoing += json.dumps({"is": what, "trial": mark, **more}).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Sends as many queued messages as the tuner reads. A stopped tuner must not block the supervisor."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._tuner.send(self._outgoing) :]
        except BlockingIOError:
            return
        except OSError:  # the tuner is gone
            self._outgoing = b""

    def _handle(self, message: dict[str, Any]) -> None:
        trial = self._trials.get(message["trial"])
        if message["do"] in ("start", "serve"):
            self._start(message)
        elif trial is not None:
            at_s = time.monotonic() + message["after_s"]
            trial.end_at_s = at_s if trial.end_at_s is None else min(trial.end_at_s, at_s)

    def _start(self, message: dict[str, Any]) -> None:
        mark = message["trial"]
        try:
            if mark in self._trials:
                raise ValueError("this trial runs already")
            with open(message["stdout"], "ab") as stdout, open(message["stderr"], "ab") as stderr:
                if message.get("server"):
                    self._fork(message, stdout, stderr)
                else:
                    self._spawn(message, stdout, stderr)
        except (OSError, ValueError) as error:
            self._say("refused", mark, why=str(error))
            return
        self._say("started", mark)
        if self._is_leaving:
            self._leave()

    def _keep(self, mark: str, pid: int, **more: Any) -> None:
        ending = process_tree.Ending(terminate_s=self._terminate_s, kill_s=self._kill_s)
        self._trials[mark] = Trial(pid=pid, ending=ending, **more)
        self._descendants.add(mark, pid)

    def _spawn(self, message: dict[str, Any], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Starts the first process of a trial, or a warm server with its socket."""
        argv = [sys.executable, "-I", "-S", str(ENTRY_POINT), str(os.getpid()), *message["argv"]]
        link, theirs = socket.socketpair() if message["do"] == "serve" else (None, None)
        with theirs or contextlib.nullcontext():
            process = subprocess.Popen(
                [*argv, str(theirs.fileno()), str(os.getpid())] if theirs else argv,
                cwd=message["cwd"],
                env=message["env"],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[theirs.fileno()] if theirs else [],
                start_new_session=True,
            )
        self._keep(message["trial"], process.pid, process=process, link=link)
        if link:
            self._selector.register(link, selectors.EVENT_READ, message["trial"])

    def _fork(self, message: dict[str, Any], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Asks a warm server to fork a trial, which becomes a child of this process."""
        server = self._trials.get(message["server"])
        if server is None or server.link is None or server.has_exited:
            raise ChildProcessError("the warm server has ended")
        ours, theirs = socket.socketpair()
        ours.settimeout(FORK_S)
        with ours, open(os.devnull, "rb") as stdin:
            with theirs:
                socket.send_fds(server.link, [b"+"], [file.fileno() for file in (stdin, stdout, stderr, theirs)])
            said = ours.recv(READ_BYTES)  # id of the trial's process, in one short line
            if not said.endswith(b"\n"):
                raise ChildProcessError("the warm server did not fork")
            self._keep(message["trial"], int(said))
            request = {name: message[name] for name in ("argv", "cwd", "env")}
            with contextlib.suppress(OSError):  # the trial has exited already; `_reap` will notice
                ours.sendall(json.dumps(request).encode() + b"\n")

    def _hear_server(self, mark: str) -> None:
        """Handles a warm server's only message (whether it is ready), and the closing of its socket when it has exited."""
        link = self._trials[mark].link if mark in self._trials else None
        if link is None:
            return
        try:
            said = link.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            self._say("ready", mark, why=json.loads(said).get("failed", ""))
        else:
            self._close_link(self._trials[mark])

    def _close_link(self, trial: Trial) -> None:
        if trial.link is not None:
            self._selector.unregister(trial.link)
            trial.link.close()
            trial.link = None

    # Processes

    def _reap(self) -> bool:
        """Collects the exit status of every child that has exited; returns whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            for mark, trial in self._trials.items():
                if trial.pid == pid and not trial.has_exited:
                    code = os.waitstatus_to_exitcode(status)
                    if trial.process is not None:
                        trial.process.returncode = code
                    trial.has_exited = True
                    self._say("exited", mark, status=code, is_own=not trial.ending.is_signalled)

    def _step(self) -> None:
        """Looks for new processes of the trials, reports them, ends trials that are due, and reports trials that are gone."""
        if not self._trials:
            return
        self._descendants.look()
        for mark, trial in list(self._trials.items()):
            seen = self._descendants.seen(mark)
            if len(seen) > trial.num_reported:
                self._say("seen", mark, processes=list(seen.items())[trial.num_reported :])
                trial.num_reported = len(seen)
            self._step_trial(mark, trial)

    def _step_trial(self, mark: str, trial: Trial) -> None:
        alive = self._descendants.of(mark)
        if not alive and self._reap():  # a child of the supervisor is left: maybe an unseen process of this trial
            self._descendants.look(is_thorough=True)
            alive = self._descendants.of(mark)
        is_due = trial.end_at_s is not None and time.monotonic() >= trial.end_at_s
        if not alive:
            if trial.has_exited:
                self._finish(mark, [])
        elif is_due and trial.ending.is_over(alive):
            self._finish(mark, [process_tree.describe(process) for process in alive])

    def _finish(self, mark: str, left: list[str]) -> None:
        shared_memory.remove(self._descendants.seen(mark))
        self._descendants.drop(mark)
        self._close_link(self._trials[mark])
        self._say("gone", mark, left=left, is_signalled=self._trials.pop(mark).ending.is_signalled)


def main() -> None:
    """Runs the supervisor; see the module docstring."""
    descriptor, terminate_s, kill_s = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tuner = socket.socket(fileno=int(descriptor))
    tuner.set_inheritable(False)
    Supervisor(tuner, terminate_s=float(terminate_s), kill_s=float(kill_s)).run()


if __name__ == "__main__":
    main()
