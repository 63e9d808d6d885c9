"""Implements `autotune sync`: mirrors a study's folder into MLflow. A running study starts this command as a subprocess."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.terminal import print_json
from autotune.errors import BadInput
from autotune.launchers.environment import own_environment
from autotune.masking import MASK, Secrets, is_masked
from autotune.monitors.sealing import seal_leftovers
from autotune.owner import owner_of
from autotune.plain_text import escaped, plain, shell_word
from autotune.run_dir import StudyFolder
from autotune.studies import call, studies
from autotune.trackers import store
from autotune.trackers import sync as implementation

if TYPE_CHECKING:
    from autotune.trackers.base import Synced

NICENESS = 19  # so that mirroring does not disturb the trial being measured
TRACKING_LOG = "tracking.log"
# JSON list of the secrets in command or configuration. The process inherits secret variables anyway.
SECRETS_VARIABLE = "AUTOTUNE_SECRETS"
ENDING_S = 20.0  # maximum wait for the supervisors to end the trials of a killed tuner


class TrackingProcess:
    """Subprocess that mirrors a running study.

    It is a separate process because importing MLflow takes seconds and a server may hang; neither may slow down a trial.
    It ends by itself soon after its parent. After `hurry`, it ends once it has written everything or the store does not answer.

    Args:
        folder: the study.
        uri: the study's `tracker.uri` with its credentials, which the study's folder does not contain; None for the default
            store.
        secrets: values that must never be written.
    """

    def __init__(self, folder: StudyFolder, uri: str | None, secrets: Secrets) -> None:
        runs = folder.path.parent.resolve()
        argv = [sys.executable, "-P", "-m", "autotune", "sync", str(folder.path.resolve()), "--follow", "--runs-dir", str(runs)]
        given = {SECRETS_VARIABLE: json.dumps(secrets.typed)}
        if uri is not None and not is_masked(uri):
            given[store.URI_VARIABLE] = uri
        self._argv, self._given, self._log = argv, given, folder.path / TRACKING_LOG
        self._process = self._start(*argv)

    def _start(self, *argv: str) -> subprocess.Popen[bytes]:
        with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab") as log:
            return subprocess.Popen(
                argv,
                env={**own_environment(), **self._given},  # not arguments: every user can read a process's arguments
                stdin=subprocess.PIPE,  # never written to; it closes when the tuner ends
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the tuner, which then waits for this subprocess
            )

    def hurry(self) -> None:
        """Restarts it at normal priority, for the end of a study. At the lowest priority, it might get no processor time."""
        self.terminate()
        self._process = self._start(*(word for word in self._argv if word != "--follow"))

    def wait(self, timeout: float | None = None) -> int:
        """Signals that the study is over, waits until everything is written and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        self._close_input()
        return self._process.wait(timeout)

    def terminate(self) -> None:
        """Kills the process immediately."""
        self._close_input()
        self._process.kill()  # killing it cannot corrupt anything
        self._process.wait()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def sync(folder: StudyFolder, *, uri: str | None, follow: bool, as_json: bool = False) -> int:
    """Mirrors a study into MLflow and prints the state of the mirror. With `follow`, continues until the study is over."""
    parent, secrets = implementation.ParentWatch(), Secrets.known(typed=_given_secrets())
    if follow:
        _lower_priority()
        state = implementation.follow(folder, uri, parent=parent, secrets=secrets, report=_Reports())
    else:
        state = implementation.sync(folder, uri, secrets=secrets)
    if state.problem != implementation.AT_WORK:  # a running `autotune sync` of this study does this itself
        wait_s = ENDING_S if follow else 0.0
        seal_leftovers(folder.path, secrets, wait_s=wait_s, is_running=lambda: _is_running(folder))
    if not state.is_complete:
        raise BadInput(_pending(folder, state, has_uri=uri is not None))
    if as_json:
        print_json(_document(folder, state))
    else:
        print(escaped(_done(folder, state)))
    return 0


def sync_all(runs: Path, *, uri: str | None, as_json: bool = False) -> int:
    """Mirrors every study of a runs folder.

    Args:
        runs: the runs folder.
        uri: address for all studies; those configured with another address are named and skipped. None for each
            study's own address.
        as_json: print the states of the mirrors as one JSON document.
    """
    if uri == store.embedded_uri(runs):
        implementation.make_store(runs)  # before the loop, so that a failure is reported once and not for each study
    problems, done = [], []
    for folder in studies(runs):
        if uri is not None and not store.may_use(folder, uri):
            said = f"{folder.name}: skipped, since its tracker.uri is {store.study_uri(folder)!r}"
            print(escaped(Secrets.known().text(said)), file=sys.stderr if as_json else sys.stdout)
            continue
        try:
            state = implementation.sync(folder, uri, wait_s=0.0)
        except BadInput as error:  # a study of another version; the other studies can still be mirrored
            problems += error.problems
            continue
        if state.problem == implementation.AT_WORK:
            print(escaped(f"{folder.name}: {state.problem}"), file=sys.stderr if as_json else sys.stdout)
        elif state.is_complete:
            done.append(_document(folder, state))
            if not as_json:
                print(escaped(_done(folder, state)))
        else:
            problems.append(_pending(folder, state, has_uri=uri is not None))
    if as_json:
        print_json(done)
    elif not any(studies(runs)):
        print(f"No study in {runs}.")
    if problems:
        raise BadInput(problems)
    return 0


def _is_running(folder: StudyFolder) -> bool:
    """Whether a tuner is running the study, other than the tuner that started this process, whose trials have ended by now."""
    owner = owner_of(folder.path)
    return owner is not None and (owner.get("host"), owner.get("pid")) != (platform.node(), os.getppid())


class _Reports:
    """Callback that prints a line when writing starts to fail, when the reason changes, and when writing works again."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, state: Synced) -> None:
        if state.problem != self._last:
            self._last = state.problem
            with contextlib.suppress(OSError):  # the log may be on a disk that is full
                words = f"tracking: {state.problem or 'up to date again'} ({state.uri})"
                print(plain(words), file=sys.stderr, flush=True)


def _given_secrets() -> list[str]:
    try:
        return [str(value) for value in json.loads(os.environ.pop(SECRETS_VARIABLE, "[]"))]
    except (ValueError, TypeError, RecursionError):
        raise BadInput(f"{SECRETS_VARIABLE}: not a JSON list of texts, got {MASK}. Unset it; autotune sets it.") from None


def _lower_priority() -> None:
    """Lowers the priority of this process and of its session. With autogroup scheduling, only the session's priority counts."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


def _document(folder: StudyFolder, state: Synced) -> dict[str, Any]:
    return {"study": folder.name, "uri": state.uri, "written": state.written, "present": state.present}


def _done(folder: StudyFolder, state: Synced) -> str:
    if state.uri == store.NONE:
        return f"{folder.name}: nothing is tracked, since tracker.uri is 'none'. To track it, give --uri URI."
    return f"{folder.name}: {state.written} trials written, {state.present} already there, in {state.uri}"


def _pending(folder: StudyFolder, state: Synced, *, has_uri: bool) -> str:
    if state.problem == implementation.AT_WORK:
        return f"STUDY: {state.problem}, got {folder.name!r}. It copies the study to MLflow: wait until it ends."
    uri = "URI" if is_masked(state.uri) else shell_word(state.uri)  # the user replaces URI by the address with its credentials
    command = f"autotune sync {call(folder)}{f' --uri {uri}' if has_uri else ''}"
    num = len(state.pending)
    missing = f"{num} trials" if num > 1 else "1 trial" if num else "the verdict"
    waiting = f"{missing} of {folder.name} {'are' if num > 1 else 'is'} not tracked yet, nothing is lost"
    return f"tracker.uri: {state.problem}, got {state.uri!r}; {waiting}. `{command}` completes it."
