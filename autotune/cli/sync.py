"""`autotune sync`: brings tracking up to date with a study's folder; the process the study starts beside itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.processes import own_environment
from autotune.cli.terminal import print_json
from autotune.errors import BadInput
from autotune.masking import Secrets, is_masked
from autotune.monitors.sealing import seal_leftovers
from autotune.run_dir import StudyFolder, studies
from autotune.trackers import store
from autotune.trackers import sync as implementation
from autotune.trackers.parent_watch import ParentWatch

if TYPE_CHECKING:
    from autotune.trackers.base import Synced

NICENESS = 19  # during a trial that is being measured
TRACKING_LOG = "tracking.log"
SECRETS_VARIABLE = "AUTOTUNE_SECRETS"  # what the tuner was given besides its environment, a JSON list
ENDING_S = 20.0  # for the trials of a tuner that was killed to be ended by those who watch over them


class TrackingProcess:
    """The process that mirrors a study while it runs. It ends by itself when the one that made it does, however that ends.

    A process of its own because importing MLflow takes seconds and a server may hang: neither may cost a trial anything.

    Args:
        folder: the study.
        uri: the study's `tracker.uri`, with the credentials that its folder does not hold; None for the default store.
        secrets: what must be written nowhere.
    """

    def __init__(self, folder: StudyFolder, uri: str | None, secrets: Secrets) -> None:
        runs = folder.path.parent.resolve()
        argv = [sys.executable, "-m", "autotune", "sync", str(folder.path.resolve()), "--follow", "--runs-dir", str(runs)]
        given = {SECRETS_VARIABLE: json.dumps(secrets.typed)}
        if uri is not None and not is_masked(uri):
            given[store.URI_VARIABLE] = uri
        path = folder.path / TRACKING_LOG
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                argv,
                env={**own_environment(), **given},  # not an argument: everybody on the machine can read those
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the study, which then lets this one finish
            )

    def wait(self, timeout: float | None = None) -> int:
        """Says that nothing more is to come, waits for the rest to be written and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it is still at work.
        """
        self._let_go()
        return self._process.wait(timeout)

    def terminate(self) -> None:
        """Ends it now."""
        self._let_go()
        self._process.kill()  # it holds nothing that a kill could break
        self._process.wait()

    def _let_go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def sync(folder: StudyFolder, *, uri: str | None, follow: bool, as_json: bool = False) -> int:
    """Mirrors a study into MLflow and says where the mirror stands; with `follow` until the study is over."""
    parent, secrets = ParentWatch(), Secrets.known(typed=_given_secrets())
    if follow:
        _give_way()
        state = implementation.follow(folder, uri, parent=parent, secrets=secrets, report=_Reports())
    else:
        state = implementation.sync(folder, uri, secrets=secrets)
    if state.problem != implementation.AT_WORK:  # else a tuner is at work, and looks after its trials itself
        seal_leftovers(folder.path, secrets, wait_s=ENDING_S if follow else 0.0)
    if not state.is_complete:
        raise BadInput(_pending(folder, state))
    if as_json:
        print_json({"study": folder.name, "uri": state.uri, "written": state.written, "present": state.present})
    else:
        print(_done(folder, state))
    return 0


def sync_all(runs: Path, *, uri: str | None) -> int:
    """Mirrors every study of a runs folder that goes to the same store as without `uri`, or as was asked.

    Args:
        runs: the runs folder.
        uri: address for all of them; studies that were configured with another one are left to it.
    """
    problems = []
    for folder in studies(runs):
        if uri is not None and store.study_uri(folder) not in (None, uri):
            continue
        try:
            state = implementation.sync(folder, uri, wait_s=0.0)
        except BadInput as error:  # of another version: the others can be mirrored all the same
            problems += error.problems
            continue
        if state.problem == implementation.AT_WORK:
            print(f"{folder.name}: {state.problem}")
        elif state.is_complete:
            print(_done(folder, state))
        else:
            problems.append(_pending(folder, state))
    if problems:
        raise BadInput(problems)
    return 0


class _Reports:
    """Says once that a store does not take what it is given, and once that it does again."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, state: Synced) -> None:
        if state.problem != self._last:
            self._last = state.problem
            print(f"tracking: {state.problem or 'up to date again'} ({state.uri})", file=sys.stderr, flush=True)


def _given_secrets() -> list[str]:
    return [str(value) for value in json.loads(os.environ.pop(SECRETS_VARIABLE, "[]"))]


def _give_way() -> None:
    """Lets trials have the cores. Where the kernel groups processes by session, only the group's own niceness counts."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


def _done(folder: StudyFolder, state: Synced) -> str:
    if state.uri == store.NONE:
        return f"{folder.name}: nothing is tracked, since tracker.uri is 'none'. To track it all the same: --uri URI."
    return f"{folder.name}: {state.written} trials written, {state.present} were there, in {state.uri}"


def _pending(folder: StudyFolder, state: Synced) -> str:
    if state.problem == implementation.AT_WORK:
        return f"STUDY: {state.problem}, got {folder.name!r}. It writes what this one would; wait for it, or try again later."
    waiting = f"{len(state.pending)} trials of {folder.name} are not tracked yet, nothing is lost"
    return f"tracker.uri: {state.problem}, got {state.uri!r}; {waiting}. `{implementation.command(folder)}` completes it."
