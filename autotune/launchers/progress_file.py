"""Reads progress.jsonl while rank 0 writes it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from autotune.harness.protocol import PHASES, Progress

MAX_READ_BYTES = 1 << 20  # most that one call reads: a program that writes into this file must not fill the tuner's memory
_FIELDS = {field.name for field in dataclasses.fields(Progress)}


class ProgressFile:
    """The progress known from the lines read so far.

    Attributes:
        newest: the last valid line; None before the first valid line.
        changed_s: when `newest` was written, on the monotonic clock.
        since_s: when the trial last entered its current phase, on the same clock. Phases repeat if the measurement restarts.
        entered_s: phase -> when its first line was written, on the same clock.

    Args:
        path: the file.
        now_s: returns the monotonic time. If a line's time is in the future, the line counts as written now.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self.newest: Progress | None = None
        self.changed_s = self.since_s = 0.0
        self.entered_s: dict[str, float] = {}
        self._path, self._now_s = path, now_s
        self._offset = 0

    @property
    def phase(self) -> str:
        """Last known phase; "spawn" before the first progress line."""
        return self.newest.phase if self.newest else PHASES[0]

    def read(self) -> None:
        """Reads the lines written since the last call. Lines that are not progress are ignored."""
        try:
            if self._path.stat().st_size <= self._offset:
                return
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read(MAX_READ_BYTES)
        except OSError:
            return
        whole = new.rfind(b"\n") + 1  # a line without a newline is still being written
        self._offset += whole or (len(new) if len(new) == MAX_READ_BYTES else 0)
        for line in new[:whole].splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            raw = json.loads(line)
            progress = Progress(**{name: value for name, value in raw.items() if name in _FIELDS})
            written_s = min(self._now_s(), float(progress.time_s))  # if time_s is NaN, min() returns the first argument
            progress.step = int(progress.step)
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
            return
        if progress.phase in PHASES:
            if self.newest is None or progress.phase != self.newest.phase:
                self.since_s = written_s
            self.newest, self.changed_s = progress, written_s
            self.entered_s.setdefault(progress.phase, written_s)
