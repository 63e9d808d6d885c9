"""Protects the user's files from a study's trials: `python -m autotune.launchers.keeper PREFIX`.

There is one such process per study or, if trials run in parallel, per slot.

A trial runs the user's command, so it saves to the same files as the real training. Other programs may save to these files at
the same time. The keeper guards the checkpoints and logs that exist when a trial begins (guarded.py), and checkpoints that
other programs create while the trial runs. It takes a read lease on each of them (leases.py): a process that opens such a file
for writing waits until the lease is released. The keeper also records which files the trial's processes write.

The keeper is a separate process, so that files stay guarded if the tuner, the supervisor or a trial is killed. If the tuner
exits during a trial, the keeper goes on until the last process of the study has exited, but at most for ALONE_S.

Each process of the study has a mark, an environment variable whose value begins with PREFIX (environment.mark_of). Tuner and
keeper send each other one JSON object per line, through the keeper's stdin and stdout:

    tuner   {"do": "begin", "files", "folders", "own", "place"}   files: what to guard; folders: what to watch; own: files that
                                                                   earlier trials made; place: the trial's folder
    keeper  {"is": "ready"}                                       guards and watches have begun: the trial may start
    tuner   {"do": "end"}                                         the trial's processes have exited
    keeper  {"is": "ended", "kept", "aside", "again", "open", "wrote", "loaded"}   kept: files that the trial would have
            changed without the guard; aside: file that the trial changed or removed -> copy of the original; again: the
            keys of `aside` at which a new file exists, created by another program after the trial had removed the original;
            open: file -> why it could not be guarded; wrote: files that the trial was seen writing, in any folder; loaded:
            checkpoints from which the trial continued a training

Keeper and harness exchange paths through files in the trial's folder; a NUL ends each path. protocol.KEPT_FILE lists the
guarded files. The harness prevents the trial from removing these or renaming other files over them (harness/guarded_files.py),
which a lease cannot prevent. The harness also protects checkpoints that the keeper does not guard, except those that earlier
trials made: protocol.OWN_FILE lists these. The harness records which files it has protected (SPARED_FILE), which files and
folders the trial creates (MADE_FILE), and from which checkpoints the trial continues a training (LOADED_FILE).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autotune.harness import protocol
from autotune.harness.checkpoints import CHECKPOINTS
from autotune.launchers.guarded import Guarded, remove_left
from autotune.launchers.leases import SIGNAL
from autotune.launchers.writers import (
    IN_CLOSE_WRITE,
    IN_CREATE,
    IN_DELETE,
    IN_ISDIR,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    Event,
    FolderWatch,
    Processes,
)

LOGS = (".csv", ".tsv", ".jsonl", ".log")  # endings of text files to which programs write metrics; each run overwrites them
# A file with one of the endings MAY_BE_LOGS is often a configuration that one rank writes and all ranks read. It is guarded
# only if LOG_NAMES is found in its name, or if it is a .txt file in one of LOG_FOLDERS.
MAY_BE_LOGS, LOG_NAMES = (".json", ".txt"), re.compile(r"log|metric|result|hist|loss|score", re.IGNORECASE)
LOG_FOLDERS = ("log", "logs", "metrics", "results")  # in lower case
STDIN = 0
READ_BYTES = 1 << 16
# Seconds until the next try to lease a file that another program is writing: SOON_S during the first SOON_FOR_S, then AGAIN_S.
AGAIN_S, SOON_S, SOON_FOR_S = 0.1, 0.005, 2.0
LOOK_S = 5.0  # seconds between two scans of the trial's open files if nothing changes in the watched folders
IDLE_FACTOR = 10  # pause after a scan, as a multiple of its CPU time: scanning takes at most a tenth of one core
# Maximum numbers of guarded checkpoints, of guarded logs (each file takes a descriptor), and of watched folders.
MAX_GUARDED, MAX_LOGS, MAX_WATCHED = 64, 64, 400
# If a trial opens a log for writing more often than this, the log is copied aside and no longer guarded. The guard delays each
# opening by a few milliseconds, which would slow the trial down.
MAX_OPENINGS = 20
MAX_WROTE = 1000  # maximum number of files recorded as written by a trial
ANY_TRIAL = Processes("")  # processes of all studies: no study's trials may overwrite the guarded files
# After the tuner has exited: pause between two checks for remaining processes of the study, and the longest time that the
# keeper waits for them. The trials normally end within seconds.
ALONE_LOOK_S, ALONE_S = 0.1, 120.0


def is_log(path: str) -> bool:
    """Whether a path looks like that of a text file to which a program writes metrics."""
    if not path.endswith(MAY_BE_LOGS):
        return path.endswith(LOGS)
    folder, name = os.path.split(path)
    is_beside_logs = name.endswith(".txt") and os.path.basename(folder).lower() in LOG_FOLDERS
    return is_beside_logs or bool(LOG_NAMES.search(name))


class Trial:
    """The guards and watches during one trial, from the tuner's "begin" message until the trial's processes are gone."""

    def __init__(self, message: dict[str, Any], processes: Processes) -> None:
        self._place, self._processes, self._folders = Path(message["place"]), processes, FolderWatch()
        self._wrote = {Path(path) for path in message["own"]}
        self._own = frozenset(self._wrote)
        self._moved: dict[int, bool] = {}  # cookie of a rename -> whether the trial made the file
        self._num_watched, self._published = 0, list[Path]()
        self._not_before_s, self._due_s = 0.0, time.monotonic() + LOOK_S  # earliest and latest time of the next scan
        self._guarded: dict[Path, Guarded] = {}
        self._refused: set[Path] = set()
        self._unleased: dict[Path, tuple[int, ...]] = {}  # log that cannot be guarded -> its `_version` when the trial began
        self._ended: list[Guarded] = []  # former guards of files that the trial has replaced or removed
        self._appeared: set[Path] = set()  # checkpoints that appeared during the trial
        # A thread that copies originals, one after another. Meanwhile, the main thread guards the other files.
        self._copying = ThreadPoolExecutor(1)
        self._list(protocol.OWN_FILE, self._own)
        remove_left(map(Path, message["files"]))
        for path in message["files"]:
            self._guard(Path(path))
        self._there = frozenset(self._guarded)
        for folder in message["folders"]:
            self._watch(Path(folder))
        self._processes.opened()  # the first call takes longest, so it is made before the trial starts
        self._publish()

    @property
    def file(self) -> int:
        """File descriptor that is readable when a watched folder has changed."""
        return self._folders.file

    @property
    def pause_s(self) -> float:
        """Seconds until `look` must be called, even if nothing has changed in the watched folders."""
        now_s = time.monotonic()
        since_s = [guarded.open_since_s for guarded in self._guarded.values() if guarded.open_since_s is not None]
        again_s = SOON_S if since_s and now_s - max(since_s) < SOON_FOR_S else AGAIN_S
        return max(0.0, min(self._due_s, now_s + again_s if since_s else math.inf) - now_s)

    def look(self, *, is_last: bool = False) -> None:
        """Handles waiting processes and changes in the watched folders. Scans open files if a scan is due, or if `is_last`."""
        events = self._folders.events()
        for guarded in self._guarded.values():
            guarded.look()
        if any(event.mask & ~IN_CLOSE_WRITE for event in events):
            self._take_all(events)
        else:
            events = []  # a file that was closed after writing needs no scan: `guarded.look` has just guarded it again
        now_s = time.monotonic()
        if is_last or (now_s >= self._not_before_s and (events or now_s >= self._due_s)):
            self._scan()
        elif events:
            self._due_s = min(self._due_s, self._not_before_s)
        self._publish()

    def _scan(self) -> None:
        """Records the files that the trial's processes have open for writing, and plans the next scan."""
        began_s = time.thread_time()
        self._note(self._processes.opened())
        now_s = time.monotonic()
        self._not_before_s, self._due_s = now_s + IDLE_FACTOR * (time.thread_time() - began_s), now_s + LOOK_S

    def end(self) -> dict[str, Any]:
        """Ends all guards and watches; returns the message "ended"."""
        self.look(is_last=True)
        self._wrote |= self._listed_by_harness(protocol.MADE_FILE)
        for path in [path for path in self._guarded if self._is_removed(path) and not os.path.lexists(path)]:
            self._lose(path)  # not noticed before if the file's folder could not be watched
        for guarded in self._guarded.values():
            guarded.end()
        self._copying.shutdown()  # waits for the copies
        self._folders.close()
        spared = self._listed_by_harness(protocol.SPARED_FILE)
        there = [guarded for path, guarded in self._guarded.items() if path in self._there] + self._ended
        aside = {guarded.path: guarded.aside for guarded in there if guarded.aside}
        # The harness also protects files that appeared during the trial. The trial may have made them: they are not reported.
        kept = {guarded.path for guarded in there if guarded.is_kept} | (spared - self._appeared)
        return {
            "is": "ended",
            "kept": sorted(map(str, kept - aside.keys())),  # files in `aside` were changed after all
            "aside": {str(path): str(copy) for path, copy in aside.items()},
            "again": [str(path) for path in aside if path in self._guarded and not self._guarded[path].aside],
            "open": {
                **{
                    str(guarded.path): guarded.why_not
                    for guarded in [*self._guarded.values(), *self._ended]
                    if guarded.why_not and self._unleased.get(guarded.path, ()) != _version(guarded.path)
                },
                **{str(path): f"at most {MAX_GUARDED} files are guarded" for path in self._refused},
            },
            "wrote": sorted(map(str, self._wrote - self._own)),
            "loaded": sorted(map(str, self._listed_by_harness(protocol.LOADED_FILE))),
        }

    def _guard(self, path: Path) -> None:
        if path in self._wrote:
            return
        if is_log(str(path)):
            self._guard_log(path)
        elif sum(not is_log(str(other)) for other in self._guarded) >= MAX_GUARDED:
            self._refused.add(path)
        else:
            self._guarded[path] = Guarded(path, is_of_trial=ANY_TRIAL.has, aside=self._place / "kept")

    def _guard_log(self, path: Path) -> None:
        """Guards a log. Skips a log that another program is writing: it cannot be leased while it is open.

        A program may keep its log open as long as the study lasts, so the keeper does not try again.
        """
        if sum(is_log(str(other)) for other in self._guarded) >= MAX_LOGS:
            return
        guarded = Guarded(path, is_of_trial=ANY_TRIAL.has, aside=self._place / "kept", max_openings=MAX_OPENINGS)
        if guarded.open_since_s is None:
            self._guarded[path] = guarded
        # Many files that are named like logs are something else. So a log that cannot be leased, as on most network file
        # systems, is reported as unguarded only if it changes.
        if guarded.why_not:
            self._unleased[path] = _version(path)

    def _watch(self, folder: Path) -> None:
        if self._num_watched < MAX_WATCHED and not folder.is_relative_to(self._place):
            self._num_watched += 1
            self._folders.watch(folder)

    def _note(self, opened: set[Path]) -> None:
        """Records open files as written by the trial. Ends the guards of those that appeared during the trial: it made them."""
        seen = {path for path in opened if not path.is_relative_to(self._place)}
        if len(self._wrote) < MAX_WROTE:
            self._wrote |= seen - self._there
        for path in seen & self._guarded.keys() - self._there:
            self._guarded.pop(path).end()

    def _take_all(self, events: list[Event]) -> None:
        self._wrote |= self._listed_by_harness(protocol.MADE_FILE)
        for event in events:
            self._take(event)
        for path in [path for path, guarded in self._guarded.items() if guarded.was_replaced()]:
            self._take_replaced(path)

    def _take(self, event: Event) -> None:
        path = event.path
        if event.mask & IN_DELETE and self._is_removed(path):
            self._lose(path)
        if event.mask & IN_MOVED_FROM:
            self._moved[event.cookie] = path in self._wrote
        if event.mask & IN_MOVED_TO and self._moved.pop(event.cookie, False):
            self._wrote.add(path)
        if event.mask & (IN_CREATE | IN_MOVED_TO):
            self._take_new(path, is_folder=bool(event.mask & IN_ISDIR))

    def _take_new(self, path: Path, *, is_folder: bool) -> None:
        if not is_folder:
            if path.name.endswith(CHECKPOINTS) and path not in self._guarded:
                self._appeared.add(path)
                self._guard(path)
        elif path.parent != self._place.parents[2]:  # new folders are watched, except in the folder that contains the studies
            self._watch(path)
            with contextlib.suppress(OSError):
                for entry in os.scandir(path):  # entries made before the watch began
                    self._take_new(Path(entry.path), is_folder=entry.is_dir(follow_symlinks=False))

    def _take_replaced(self, path: Path) -> None:
        if path in self._wrote:  # replaced by the trial, in a way that neither lease nor harness could prevent
            self._lose(path)
        elif os.path.lexists(path):
            self._guarded[path].follow()

    def _is_removed(self, path: Path) -> bool:
        """Whether a file that existed at this path when the trial began, and is still guarded, was removed or replaced."""
        return path in self._there and path in self._guarded and self._guarded[path].has_no_name()

    def _lose(self, path: Path) -> None:
        """Copies aside the original of a file that the trial has replaced or removed, and ends its guard."""
        guarded = self._guarded.pop(path)
        guarded.let_go()
        try:
            self._copying.submit(guarded.end_aside)
        except RuntimeError:  # the system refuses to start a thread
            guarded.end_aside()
        self._ended.append(guarded)
        self._there -= {path}  # a file created at this path from now on is a new file

    def _publish(self) -> None:
        # A file whose original has been copied aside needs no protection by the harness.
        paths = [path for path in sorted(self._guarded) if not self._guarded[path].aside]
        if paths != self._published:
            self._published = paths
            self._list(protocol.KEPT_FILE, paths)

    def _list(self, name: str, paths: Iterable[Path]) -> None:
        """Writes one of the lists of paths that the harness reads."""
        temporary = self._place / f"{name}.tmp"
        with contextlib.suppress(OSError):  # the disk is full or the folder is gone: only the leases protect the files then
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(f"{path}\0" for path in paths)
            os.replace(temporary, self._place / name)

    def _listed_by_harness(self, name: str) -> set[Path]:
        """Returns the paths that the harness has listed in one of its files."""
        with contextlib.suppress(OSError):
            text = (self._place / name).read_text(encoding="utf-8", errors="surrogateescape")
            return set(map(Path, filter(None, text.split("\0"))))
        return set()


class Keeper:
    """The keeper program: its state, and its main loop in `run`. All marks of the study's processes begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._processes = Processes(prefix)
        self._trial: Trial | None = None
        self._incoming = b""
        self._alone_until_s: float | None = None

    def run(self) -> None:
        """Serves until the tuner has exited.

        If a trial is running then, goes on until all processes of the study have exited, but at most for ALONE_S.
        """
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(SIGNAL, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it must outlive the tuner and the trials
        while not self._is_over():
            folders = [self._trial.file] if self._trial else []
            tuner = [] if self._alone_until_s else [STDIN]
            readable, _, _ = select.select([woken, *folders, *tuner], [], [], self._pause_s())
            if woken in readable:
                os.read(woken, READ_BYTES)
            if self._trial is not None:
                self._trial.look()
            if STDIN in readable:
                self._hear()
        if self._trial is not None:
            self._trial.end()  # so that processes, such as another study's trial, no longer wait to open a file

    def _pause_s(self) -> float | None:
        pauses = [self._trial.pause_s] if self._trial else []
        pauses += [ALONE_LOOK_S] if self._alone_until_s else []
        return min(pauses, default=None)

    def _is_over(self) -> bool:
        if self._alone_until_s is None:
            return False
        return self._trial is None or time.monotonic() > self._alone_until_s or not self._processes.is_any_left()

    def _hear(self) -> None:
        chunk = os.read(STDIN, READ_BYTES)
        if not chunk:
            self._alone_until_s = time.monotonic() + ALONE_S
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        for message in map(json.loads, lines):
            if self._trial is not None:
                report = self._trial.end()
                self._trial = None
                if message["do"] == "end":
                    _say(report)
            if message["do"] == "begin":
                self._trial = Trial(message, self._processes)
                _say({"is": "ready"})


def _version(path: Path) -> tuple[int, ...]:
    """Returns inode, size and modification time, which show whether a file was written or replaced; (-1,) if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return (-1,)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the tuner is gone
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    Keeper(sys.argv[1]).run()
