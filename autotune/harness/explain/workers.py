"""Observes a loader worker: its stages and its lines, written at intervals to a file that the training process reads."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import shutil
import time
from multiprocessing.util import Finalize
from typing import Any, Dict, List, Optional, Tuple

from ..protocol import SCRATCH, write_text
from .documents import INPUT, WORKER, Line, Stage
from .sampler import LineSampler, most_of_each
from .sources import Sources
from .stages import Stages, stages_of, together

INTERVAL_S = 0.004  # between samples
WRITE_S, WRITE_COST = 0.25, 100.0  # minimum time between two writes: in seconds, and in multiples of the time of a write
IDS = ("file", "line", "function", "where", "is_own", "phase")  # these identify a line


class ObservedWorker:
    """Observes this worker process until it ends, and writes what it sees to a file in the trial's folder."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stages = Stages(is_worker=True)
        self._stages.install()
        self._stages.install_sending()
        self._sampler = LineSampler(Sources(), INTERVAL_S, lambda: INPUT if self._stages.is_fetching else "", WORKER)
        self._sampler.after_sample = self._write_if_due
        self._next_s = time.monotonic() + WRITE_S
        self._has_written = False
        Finalize(None, self._write_at_end, exitpriority=0)
        self._sampler.start()

    def _write_at_end(self) -> None:
        if not self._has_written:  # the epoch was short; lines are left out, because reading source files would delay the end
            self._write([])

    def _write_if_due(self) -> None:
        begin_s = time.monotonic()
        if begin_s < self._next_s:
            return
        self._has_written = True
        self._write(self._sampler.lines(1.0))
        now_s = time.monotonic()
        self._next_s = now_s + max(WRITE_S, WRITE_COST * (now_s - begin_s))

    def _write(self, lines: List[Line]) -> None:
        document = {
            "counts": self._stages.counts(),
            "places": self._stages.places,
            "knows_delays": self._stages.knows_delays,
            "lines": list(map(dataclasses.asdict, lines)),
        }
        with contextlib.suppress(OSError):  # the folder is gone or the disk is full: the loader must work anyway
            write_text(self._path, json.dumps(document), is_durable=False)


_observed: Optional[ObservedWorker] = None


def observe(prefix: str) -> None:
    """Observes this worker process from now on; called once, in the worker."""
    global _observed
    _observed = ObservedWorker(f"{prefix}.{os.getpid()}.json")


def prefix(folder: str, number: int) -> str:
    """Returns the beginning of the paths of all files that a loader's workers write, and makes their folder.

    Called in the training process.
    """
    place = _place(folder)
    with contextlib.suppress(OSError):  # the disk is full: then nothing is known about the workers
        os.makedirs(place, mode=0o700, exist_ok=True)
    return os.path.join(place, f"loader{number}")


def _place(folder: str) -> str:
    """Returns the folder for the files of this process's workers; other ranks have their own.

    The files contain source lines. If the pass is cut off, they are removed with SCRATCH, like all files in which secrets are
    not masked yet.
    """
    return os.path.join(folder, SCRATCH, f"stages.{os.getpid()}")


Reading = Dict[str, Dict[str, Any]]  # file of a worker -> what it wrote last


def read(start: str) -> Reading:
    """Returns what workers have written so far to the files whose paths begin with `start`; see `prefix`."""
    found = {}
    for path in glob.glob(f"{glob.escape(start)}.*.json"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            found[path] = json.load(file)
    return found


def between(before: Reading, after: Reading, num_steps: float) -> Tuple[List[Stage], List[Line], Dict[str, Any]]:
    """Returns stages, lines (seconds per step) and counts of all workers between two readings."""
    earlier = {path: reading["counts"] for path, reading in before.items() if path in after}
    if not any(now["counts"]["timed"] > earlier.get(path, {"timed": 0})["timed"] for path, now in after.items()):
        before, earlier = {}, {}  # no worker has written new samples since `before`: count from the workers' start
    places: Dict[str, Any] = {}
    for now in after.values():
        places.update({name: tuple(place) for name, place in now["places"].items()})
    whole = together([now["counts"] for now in after.values()], list(earlier.values()))
    knows_delays = all(now["knows_delays"] for now in after.values())
    return stages_of(whole, places, WORKER, knows_delays=knows_delays), _lines(before, after, num_steps), whole


def _lines(before: Reading, after: Reading, num_steps: float) -> List[Line]:
    sums: Dict[Any, Line] = {}
    for reading, sign in ((after, 1.0), (before, -1.0)):
        for each in (line for path in reading if path in after for line in reading[path]["lines"]):
            key = tuple(each[name] for name in IDS)
            line = sums.setdefault(key, Line(**{**each, "self_s": 0.0, "total_s": 0.0}))
            line.self_s += sign * each["self_s"] / num_steps
            line.total_s += sign * each["total_s"] / num_steps
    return most_of_each([line for line in sums.values() if line.total_s > 0])


def remove(folder: str) -> None:
    """Removes the workers' files, once they have been read.

    The folder is renamed first, so that a worker that still writes does not find it.
    """
    taken = f"{_place(folder)}.read"
    with contextlib.suppress(OSError):
        os.rename(_place(folder), taken)
    shutil.rmtree(taken, ignore_errors=True)
