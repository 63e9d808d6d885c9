"""Brings a tracker up to date with a study's folder, either once or for as long as the study runs.

Each trial is stored in the study's folder, durably and without secrets, before any tracker sees it. If a store is down, or the
process is killed, a later `autotune sync` writes what is missing.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.documents import read_json, write_json
from autotune.errors import BadInput
from autotune.masking import Secrets
from autotune.run_dir import StudyFolder
from autotune.studies import call
from autotune.trackers import store
from autotune.trackers.base import NullTracker, Synced, Tracker

STANDING_FILE = "tracking.json"  # in the study's folder: the state of the mirror (`note`)
POLL_S = 0.5
LEFT_S = 2.0  # longest wait until a killed tuner's lock on its study is free
LONGEST_PAUSE_S = 30.0  # longest pause between two attempts on a store that is down
# Mirroring uses at most this share of one core's time: reading a study takes longer with every trial, and trials run meanwhile.
SHARE_FRAC = 0.05
# Seconds that this process may still write after the tuner has ended or closed the pipe (see ParentWatch). 60 s were not enough
# on two cores that an MLflow UI was also using.
LAST_S = 240.0
LOCK_WAIT_S = 10.0
AT_WORK = "another `autotune sync` of this study is running"
# `sync` makes at most ATTEMPTS attempts, with pauses of PAUSE_S seconds. A request times out after PATIENT_S in `sync`, which
# has time for a slow server. In `follow`, which must soon notice that its study is over, it times out after BRISK_S.
ATTEMPTS, PAUSE_S, PATIENT_S, BRISK_S = 3, 2.0, 30.0, 10.0
EXIT_TOO_LATE = 1  # exit status of a process that `ParentWatch.limit` has ended

Report = Callable[[Synced], None]


class ParentWatch:
    """Detects that the parent has ended or has closed the pipe on this process's standard input.

    The pipe closes no matter how the parent ends, and it stays closed. So even a parent that ended before the first check is
    noticed. The parent may also close the pipe on purpose, when no more work will follow. If standard input is not a pipe, only
    the parent process id is checked.
    """

    def __init__(self) -> None:
        self._parent, self._has_pipe = os.getppid(), False
        with contextlib.suppress(OSError):  # closed
            self._has_pipe = stat.S_ISFIFO(os.fstat(0).st_mode)

    @property
    def is_gone(self) -> bool:
        """Whether the parent has ended or closed the pipe."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Waits until the parent is gone, at most `seconds`; without a pipe, always `seconds`. Returns whether it is gone."""
        if self._has_pipe:
            watch = select.poll()
            watch.register(0, 0)  # a hang-up is always reported; input is ignored
            return bool(watch.poll(seconds * 1000))
        time.sleep(seconds)
        return os.getppid() != self._parent

    def limit(self, last_s: float) -> None:
        """Ends this process `last_s` seconds after the parent is gone, no matter what this process is doing then."""

        def watch() -> None:
            while not self.wait(1.0):
                pass
            time.sleep(last_s)
            os._exit(EXIT_TOO_LATE)

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def sync(
    folder: StudyFolder,
    uri: str | None = None,
    *,
    secrets: Secrets | None = None,
    wait_s: float = LOCK_WAIT_S,
) -> Synced:
    """Mirrors a study's folder into a tracking store, and returns the state of the mirror.

    Args:
        folder: the study.
        uri: tracking address; None for the study's `tracker.uri`, else MLFLOW_TRACKING_URI, else the embedded store.
        secrets: values that must not be uploaded; None for the secrets of this environment.
        wait_s: longest wait, in seconds, for another process that mirrors the same study.

    Raises:
        BadInput: the folder is not a study, or the address is invalid.
    """
    tracker, address = _tracker(folder, uri, secrets, timeout_s=PATIENT_S)
    with store.only_writer(folder, wait_s=wait_s) as is_alone:
        if not is_alone:
            return Synced(problem=AT_WORK, uri=address)
        num_written = 0
        for pause_s in [PAUSE_S] * (ATTEMPTS - 1) + [0.0]:
            state = tracker.push(folder)
            num_written += state.written
            if state.is_complete or not state.written:  # a server that accepted nothing will hardly recover within PAUSE_S
                break
            time.sleep(pause_s)
        state.written, state.present = num_written, state.written + state.present - num_written
        note(folder, state)
        return state


def make_store(runs: Path) -> None:
    """Makes the embedded store of a runs folder unless it exists.

    Raises:
        BadInput: it cannot be made.
    """
    from autotune.trackers.mlflow import MlflowTracker

    MlflowTracker(store.embedded_uri(runs), runs).make_store()


def follow(
    folder: StudyFolder,
    uri: str | None = None,
    *,
    parent: ParentWatch,
    secrets: Secrets | None = None,
    report: Report = lambda _: None,
) -> Synced:
    """Mirrors a study while it runs, until it is over or its tuner is gone, and returns the state of the mirror.

    Args:
        folder: the study.
        uri: as in `sync`.
        parent: watches the process that started this one.
        secrets: as in `sync`.
        report: callback with the state after every attempt to write.

    Raises:
        BadInput: the folder is not a study, or the address is invalid.
    """
    parent.limit(LAST_S)
    try:
        tracker, address = _tracker(folder, uri, secrets, timeout_s=BRISK_S)
        with _lock(folder, parent) as is_alone:
            return _follow(tracker, folder, report, parent) if is_alone else Synced(problem=AT_WORK, uri=address)
    except BadInput as error:
        note(folder, Synced(problem=error.problems[0]))
        raise


def note(folder: StudyFolder, state: Synced) -> None:
    """Writes the state of the mirror to the study's folder, to be read when the study ends."""
    with contextlib.suppress(OSError):  # a read-only copy of a study
        write_json(
            folder.path / STANDING_FILE,
            {"uri": state.uri, "mirrored": state.written + state.present, "pending": state.pending, "problem": state.problem},
        )


def standing(folder: StudyFolder) -> Synced | None:
    """Returns the state that `note` wrote last; None if there is none."""
    try:
        raw = read_json(folder.path / STANDING_FILE)
        return Synced(present=raw["mirrored"], pending=list(raw["pending"]), problem=raw["problem"], uri=raw["uri"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def incomplete(folder: StudyFolder, why: str) -> str:
    """Returns the message at the end of a study whose tracking is incomplete. A problem that `note` stored replaces `why`."""
    state, num_trials = standing(folder), len(folder.trial_files("trial.json"))
    num_missing = num_trials - (state.present if state else 0)
    said = f"{num_missing} of {num_trials} trials" if num_missing > 0 else "the verdict"
    if state and state.problem:
        why = f"{state.problem} from {state.uri}" if state.problem.startswith("no answer") else state.problem
    command = f"autotune sync {call(folder)}"
    return f"Tracking is incomplete: MLflow lacks {said} ({why}). Nothing is lost: `{command}` completes it."


def _tracker(folder: StudyFolder, uri: str | None, secrets: Secrets | None, *, timeout_s: float) -> tuple[Tracker, str]:
    runs, secrets = folder.path.parent, secrets or Secrets.known()
    address = store.chosen_uri(runs, asked=uri, folder=folder)
    if address == store.NONE:
        return NullTracker(), address
    from autotune.trackers.mlflow import MlflowTracker

    experiment = secrets.message(store.chosen_experiment(address, folder))  # a stranger's study may refer to any variable
    return MlflowTracker(address, runs, experiment=experiment, secrets=secrets, timeout_s=timeout_s), secrets.text(address)


def _follow(tracker: Tracker, folder: StudyFolder, report: Report, parent: ParentWatch) -> Synced:
    seen, state, pause_s, next_try = None, Synced(), POLL_S, 0.0
    read, is_over = None, False
    while True:
        if (written := _written(folder)) != read:  # reads the summary only if it has changed, because it may be large
            read, is_over = written, _is_over(folder)
        if parent.is_gone and not is_over:  # must precede the push, so that the last push misses nothing
            is_over = True
            _wait_until_left(folder)
        if time.monotonic() >= next_try or is_over:
            began_s, is_first = time.process_time(), seen is None  # the first push imports MLflow
            # If the tuner is killed, no file changes any more. Only `is_owned` shows that the study's status has changed.
            found = (*_written(folder), len(folder.trial_files("trial.json")), folder.is_owned)
            if found != seen or not state.is_complete:
                state, seen = tracker.push(folder, is_last=is_over), found
                pause_s = POLL_S if state.is_complete else min(2 * pause_s, LONGEST_PAUSE_S)
                note(folder, state)
                report(state)
            rest_s = 0.0 if is_first else (time.process_time() - began_s) / SHARE_FRAC
            next_try = time.monotonic() + max(pause_s, rest_s)
        if is_over:
            return state
        parent.wait(POLL_S)


def _wait_until_left(folder: StudyFolder) -> None:
    """Waits until the study has no owner: when a tuner is killed, its pipe may close a little before its lock is released."""
    until_s = time.monotonic() + LEFT_S
    while folder.is_owned and time.monotonic() < until_s:
        time.sleep(0.05)


@contextlib.contextmanager
def _lock(folder: StudyFolder, parent: ParentWatch) -> Iterator[bool]:
    """Waits for another `autotune sync` of the study, at most until the study is over; yields whether the lock was obtained."""
    while True:
        with store.only_writer(folder, wait_s=POLL_S) as is_alone:
            if is_alone or parent.is_gone or _is_over(folder):
                yield is_alone
                return


def _is_over(folder: StudyFolder) -> bool:
    try:
        return bool(folder.read_outline().get("status", "running") != "running")
    except (OSError, ValueError):  # no summary yet
        return False


def _written(folder: StudyFolder) -> tuple[int, ...]:
    """Returns (modification time, inode) of the summary's file, which change whenever it is written; () if it is absent."""
    try:
        found = folder.summary_file.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ino
