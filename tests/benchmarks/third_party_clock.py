"""Reads the rate of a training program from what it prints, to compare it with the rate that autotune counts.

Most programs print how far they are ("[640/60000]", a progress bar), not how fast. `Watch` notes when each of these lines is
written. So the rate comes from the program's own count and the benchmark's clock, independent of autotune's measurement.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LOOK_EVERY_S = 0.02
# A step that a line counts may end this long after the line: seconds, or share of a step, whichever is shorter.
LATER_S, LATER_STEPS = 0.05, 0.25
LINE_END = re.compile(rb"[\r\n]")


@dataclass(frozen=True)
class Clock:
    """How a program prints its progress.

    Attributes:
        pattern: regular expression of such a line. Group `done` is the progress and `total` the progress of a whole epoch;
            without `done`, each such line stands for one unit of progress, or for as many as group `more` says. Group `who`
            names one of several processes that print progress of their own, by its process id.
        samples: number of autotune's units (samples, tokens or steps) in a unit of progress, of the process that `who` names
            or, without `who`, of all processes.
        is_steps: whether progress is counted in steps, so that a larger batch size means more samples per unit.
    """

    pattern: str
    samples: float = 1.0
    is_steps: bool = False


class Span(NamedTuple):
    """Part of a run, from one line to another."""

    first_s: float
    last_s: float
    samples: float

    @property
    def rate_per_s(self) -> float:
        """Samples per second."""
        return self.samples / (self.last_s - self.first_s)


@dataclass
class Marks:
    """Progress of one process: when it was printed, in seconds on the monotonic clock, and how far it was, in samples."""

    times_s: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)

    def span(self, begin_s: float, end_s: float) -> Span | None:
        """Returns the progress between the marks nearest to two times; None if both are the same mark."""
        if not self.times_s:
            return None
        first, last = (min(range(len(self.times_s)), key=lambda i: abs(self.times_s[i] - at_s)) for at_s in (begin_s, end_s))
        done = self.done[last] - self.done[first]
        return Span(self.times_s[first], self.times_s[last], done) if last > first else None


def marks(clock: Clock, lines: Iterable[tuple[float, str]]) -> dict[str, Marks]:
    """Returns the progress of each process. When the program's count starts again, the epoch's total is added.

    The count has started again if it falls to less than half. It falls by less in a program that prints the number of batches
    times the size of the last batch, which is smaller.

    Args:
        clock: what the program prints.
        lines: when each line was written, and the line.
    """
    found: dict[str, Marks] = {}
    before: dict[str, tuple[float, float]] = {}  # progress of the epochs that are over, and of this one
    for at_s, line in lines:
        for match in re.finditer(clock.pattern, line):
            groups = match.groupdict()
            who = groups.get("who") or ""
            over, last = before.get(who, (0.0, 0.0))
            done = float(groups["done"]) if "done" in groups else last + float(groups.get("more") or 1)
            if done < last / 2:
                over += float(groups.get("total") or last)
                last = 0.0
            before[who] = over, max(done, last)
            mark = found.setdefault(who, Marks())
            if not mark.done or (over + done) * clock.samples > mark.done[-1]:  # another rank may print the same
                mark.times_s.append(at_s)
                mark.done.append((over + done) * clock.samples)
    return found


def rate_per_s(clock: Clock, lines: list[tuple[float, str]], begin_s: float, end_s: float) -> float | None:
    """Returns the samples per second of all processes together, between two times; None if too little was printed."""
    spans = [mark.span(begin_s, end_s) for mark in marks(clock, lines).values()]
    return sum(span.rate_per_s for span in spans if span) if spans and all(spans) else None


class Watch:
    """Notes when lines are added to the logs that a folder gets while the `with` block runs.

    Args:
        folder: the folder.
        pattern: glob of the logs; logs that exist already are left out.
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._old, self._rest = set(folder.glob(pattern)), dict[Path, bytes]()
        self._read: dict[Path, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.lines: dict[Path, list[tuple[float, str]]] = {}  # folder of the log -> when, and what

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look_at_all()

    def _follow(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            self._look_at_all()

    def _look_at_all(self) -> None:
        for path in self._folder.glob(self._pattern):
            if path not in self._old:
                self._look(path)

    def _look(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            added = file.read()
        if added:
            now_s = time.monotonic()
            self._read[path] = self._read.get(path, 0) + len(added)
            *whole, self._rest[path] = LINE_END.split(self._rest.get(path, b"") + added)
            if b"\r" in added:  # a progress bar: its last line is complete, although the next line brings its end
                whole.append(self._rest[path])
            lines = self.lines.setdefault(path.parent, [])
            lines += [(now_s, line.decode(errors="replace")) for line in whole if line]


@dataclass(frozen=True)
class Compared:
    """What autotune counted in a trial, and what the program printed in the same seconds.

    Attributes:
        trial: name of the trial's folder.
        counted_per_s: samples that autotune counted.
        own_per_s: samples that the program printed.
        seconds: time between the two lines used: the first after a step, and the last.
        window_per_s: the rate that autotune reports: that of its window, which excludes evaluations.
    """

    trial: str
    counted_per_s: float
    own_per_s: float
    seconds: float
    window_per_s: float


def compare(clock: Clock, watch: Watch) -> Iterator[Compared]:
    """Yields every trial that has a rate and printed its progress.

    Args:
        clock: what the program prints.
        watch: what was written to the logs of the trials.
    """
    for folder, lines in sorted(watch.lines.items()):
        record, result = (_document(folder / name) for name in ("trial.json", "result.rank0.json"))
        if not record.get("value") or not result.get("window") or _changes_batch(clock, record):
            continue
        parts = [_part(folder, who, mark) for who, mark in marks(clock, lines).items()]
        if not parts or not all(parts):
            continue
        counted, own = (sum(rates) for rates in zip(*(part[:2] for part in parts if part), strict=True))
        yield Compared(folder.name, counted, own, min(part[2] for part in parts if part), record["value"])


def _part(folder: Path, who: str, mark: Marks) -> tuple[float, float, float] | None:
    """Returns the samples per second that autotune counted and that a process printed, and the seconds between the lines.

    The steps that ended between the first line after a step and the last line are counted. So neither a step that is half done
    at a line nor an evaluation between a step and a line makes a difference.

    Args:
        folder: the trial's.
        who: id of the process that printed; "" for all of them.
        mark: what was printed.
    """
    results = [_document(path) for path in sorted(folder.glob("result.*.json"))]
    of_process = [result for result in results if str(result["pid"]) == who] or results
    origin_s = _origin_s(folder, of_process[0])
    after_s = [at_s for at_s in mark.times_s if at_s >= origin_s]
    span = mark.span(after_s[0], after_s[-1]) if after_s else None
    if span is None:
        return None
    counted = sum(_ended(folder, result, span.last_s) - _ended(folder, result, span.first_s) for result in of_process)
    seconds = span.last_s - span.first_s
    return counted / seconds, span.rate_per_s, seconds


def _ended(folder: Path, result: dict[str, Any], at_s: float) -> float:
    """Returns the samples of all steps of a process, except the first, that had ended at a time on the monotonic clock.

    A program may print just before autotune notes the end of the step, so the step may also end a little later.
    """
    ends_s = np.asarray([0.0, *result["steps"]["end_s"]]) + _origin_s(folder, result)
    later_s = min(LATER_S, LATER_STEPS * float(np.median(np.diff(ends_s)))) if len(ends_s) > 1 else 0.0
    return float(np.sum(np.asarray(result["steps"]["samples"])[ends_s[1:] <= at_s + later_s]))


def _changes_batch(clock: Clock, record: dict[str, Any]) -> bool:
    return clock.is_steps and any("batch" in key or "accumulation" in key for key in record.get("changed") or {})


def _document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _origin_s(folder: Path, result: dict[str, Any]) -> float:
    """Returns when the first step of a process ended, on the monotonic clock."""
    lines = map(json.loads, (folder / "progress.jsonl").read_text().splitlines())
    told = result["steps"].get("origin_s")
    return float(told) if told else next(float(line["time_s"]) for line in lines if line["step"] >= 1)
