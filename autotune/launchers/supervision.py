"""Runs the supervisor process from the tuner's side: starts it, sends it requests and receives its messages."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from autotune.harness import protocol
from autotune.launchers.environment import SUPERVISOR, mark_of, own_environment
from autotune.launchers.process_tree import exit_status
from autotune.plain_text import plain, shortened
from autotune.process_ends import signal_name

READ_BYTES = 1 << 16
ANSWER_S = 30.0  # longest wait for an answer; a start takes milliseconds, or seconds on a machine that swaps
GONE_S = 30.0  # longest wait until a warm server that cannot be used has exited
CLOSE_S = 5.0  # longest wait for the supervisor's exit, not counting grace periods
Message = dict[str, Any]


class SupervisorLost(Exception):
    """The supervisor process has exited, or does not answer in time."""


class NotForked(Exception):
    """A warm server (warm.py) could not fork a trial; the message says why. A fresh start may still work."""


class SupervisorProcess:
    """One supervisor process. It is ended when this object is closed or garbage-collected, or when the tuner exits.

    Args:
        study: the study's folder. The supervisor's mark names it and `slot` (environment.mark_of).
        slot: name of the slot whose trials the supervisor starts; "" for the whole machine.
        cores: the cores that these trials may use; () for all.
        terminate_s, kill_s: grace periods after SIGTERM and after SIGKILL.
    """

    def __init__(self, study: Path, *, terminate_s: float, kill_s: float, slot: str = "", cores: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 (the log's last line says why the process exited on its own)
        argv = [sys.executable, "-P", "-m", "autotune.launchers.supervisor", *map(str, (theirs.fileno(), terminate_s, kill_s))]
        try:
            self._process = subprocess.Popen(
                argv,
                cwd="/",  # a process's working directory cannot be unmounted
                env={**own_environment(), protocol.MARK_VARIABLE: mark_of(study, SUPERVISOR, slot)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # neither Ctrl-C nor a hangup may reach it
            )
            if cores:  # the trials inherit this affinity
                os.sched_setaffinity(self._process.pid, cores)
        except BaseException:
            ours.close()
            log.close()
            raise
        finally:
            theirs.close()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(ANSWER_S), 0))
        self._socket, self._log = ours, log
        self._poll = select.poll()
        self._poll.register(ours, select.POLLIN)
        self._buffer = b""
        self._inbox: dict[str, list[Message]] = {}
        self.end: str | None = None
        self.close = weakref.finalize(self, _close, ours, self._process, log, terminate_s + kill_s + CLOSE_S)

    def start(self, mark: str, *, argv: list[str], cwd: str, env: dict[str, str], folder: Path, server: str = "") -> None:
        """Starts a trial.

        Args:
            mark: the trial's mark.
            argv: the command.
            cwd: working directory.
            env: the complete environment.
            folder: the folder for the trial's output.
            server: mark of the warm server that forks the trial; "" for a fresh start.

        Raises:
            OSError: the process cannot be started.
            NotForked: the warm server could not fork the trial.
            SupervisorLost: the supervisor has exited or does not answer.
        """
        logs = {"stdout": str(folder / protocol.STDOUT_FILE), "stderr": str(folder / protocol.STDERR_FILE)}
        try:
            self._ask({"do": "start", "trial": mark, "argv": argv, "cwd": cwd, "env": env, **logs, "server": server})
        except OSError as error:
            if server:
                raise NotForked(str(error)) from error
            raise

    def serve(self, mark: str, *, argv: list[str], cwd: str, env: dict[str, str], patience_s: float) -> str:
        """Starts a warm server and waits until it is ready; returns "". If it cannot be used, ends it and returns the reason.

        Args:
            mark: the server's mark.
            argv: the command. The supervisor appends two arguments, which harness/warm_server.py describes.
            cwd: working directory.
            env: the complete environment.
            patience_s: how long the server may take to get ready.

        Raises:
            OSError: the process cannot be started.
            SupervisorLost: the supervisor has exited, or does not answer.
        """
        null = os.devnull
        self._ask({"do": "serve", "trial": mark, "argv": argv, "cwd": cwd, "env": env, "stdout": null, "stderr": null})
        give_up_s = time.monotonic() + patience_s
        why = f"it was not ready after {patience_s:g} s"
        said: dict[str, Message] = {}
        while (left_s := give_up_s - time.monotonic()) > 0 and self.end is None:
            said.update((message["is"], message) for message in self.messages(mark))
            if "ready" in said:
                why = said["ready"]["why"]
                break
            if "exited" in said:
                why = f"it ended with status {said['exited']['status']}"
                break
            self.wait(left_s)
        if why:
            self.end_trial(mark, after_s=0.0)
            give_up_s = time.monotonic() + GONE_S
            while "gone" not in said and (left_s := give_up_s - time.monotonic()) > 0 and self.end is None:
                self.wait(left_s)
                said.update((message["is"], message) for message in self.messages(mark))
        return why

    def _ask(self, message: Message) -> None:
        """Requests the start of a process, and waits for the answer."""
        mark = message["trial"]
        self._inbox[mark] = []
        self._send(message)
        give_up_s = time.monotonic() + ANSWER_S
        while not (answers := self.messages(mark)):
            if self.end is not None or time.monotonic() > give_up_s:
                self.kill()
                raise SupervisorLost(self.end)
            self.wait(give_up_s - time.monotonic())
        self._inbox[mark] = answers[1:]
        if answers[0]["is"] == "refused":
            raise OSError(answers[0]["why"])

    def end_trial(self, mark: str, *, after_s: float) -> None:
        """Requests that a trial's processes be ended after `after_s`; returns at once."""
        self._send({"do": "end", "trial": mark, "after_s": after_s})

    def messages(self, mark: str) -> list[Message]:
        """Returns the messages about a trial since the last call. Costs one system call if there are no messages."""
        self._receive()
        return self._inbox.pop(mark, [])

    def wait(self, seconds: float) -> None:
        """Waits for a message, at most this long."""
        if self.end is None:
            self._poll.poll(max(0.0, seconds) * 1000)

    def kill(self) -> None:
        """Kills a supervisor that no longer answers; the kernel then terminates the trials' first processes."""
        self._process.kill()
        self._note_end()

    def _send(self, message: Message) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except BlockingIOError:  # the supervisor no longer reads
            self.kill()
        except OSError:
            self._receive()  # messages that the supervisor sent before it exited still count

    def _receive(self) -> None:
        while self.end is None:
            try:
                chunk = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._note_end()
                return
            *lines, self._buffer = (self._buffer + chunk).split(b"\n")
            for message in map(json.loads, lines):
                self._inbox.setdefault(message["trial"], []).append(message)

    def _note_end(self) -> None:
        status = exit_status(self._process, CLOSE_S)  # the supervisor may have closed its socket but still run
        if self.end is None:
            self.end = f"killed by {signal_name(-status)}" if status < 0 else f"lost, status {status}{_last_line(self._log)}"


def _close(ours: socket.socket, process: subprocess.Popen[bytes], log: IO[bytes], patience_s: float) -> None:
    """Closes a supervisor's socket, so that it ends every trial and exits; waits for that. Also called when the tuner exits."""
    ours.close()
    exit_status(process, patience_s)
    log.close()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    said = plain(log.read().decode("utf-8", "replace")).strip().rpartition("\n")[2].strip()
    return f": {shortened(said, 200)}" if said else ""
