"""Times the phases of this process and reports them to the tuner in progress lines."""

from __future__ import annotations

import json
import os
import time
from typing import Dict

from . import protocol
from .context import TrialContext

HEARTBEAT_S = 0.2  # seconds between two progress lines within a phase
HAS_WRITER = protocol.SPEC_VARIABLE + "_HAS_WRITER"  # set once a process writes progress lines


class Phases:
    """The phases of one process.

    Attributes:
        now: the current phase; "" before the first.
        seconds: phase -> seconds, for phases that are over.
        is_writing: whether this process writes progress lines. Only rank 0 of a trial does; a real run writes none.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self.now = ""
        self.seconds: Dict[str, float] = {}
        self._since_s = context.started_s
        self.next_beat_s = 0.0
        self._progress = -1
        self.is_writing = not context.is_applying and self._is_first()

    def _is_first(self) -> bool:
        # One process reports the time before training. Processes that it starts (compile workers, helpers) report only once
        # they train themselves.
        is_first = HAS_WRITER not in os.environ and self._context.rank == 0
        os.environ[HAS_WRITER] = "1"
        return is_first

    def start_writing(self) -> None:
        """Lets this process write progress lines. Called when it trains."""
        self.is_writing = not self._context.is_applying

    def enter(self, phase: str) -> None:
        """Marks the start of a phase; entering the current phase again changes nothing."""
        if phase == self.now:
            return
        now_s = time.monotonic()
        if self.now:
            self.seconds[self.now] = self.seconds.get(self.now, 0.0) + now_s - self._since_s
        self.now, self._since_s = phase, now_s
        self.beat(now_s)

    def beat(self, now_s: float) -> None:
        """Writes a progress line; the caller limits how often."""
        context = self._context
        self.next_beat_s = now_s + HEARTBEAT_S
        if context.rank != 0 or not self.is_writing:
            return
        rate = context.window.rate_per_s
        time_s = now_s + context.clock_offset_s
        line = json.dumps({"time_s": time_s, "phase": self.now, "step": context.num_steps, "rate_per_s": rate})
        try:
            if self._progress < 0:
                path = os.path.join(context.spec.folder, protocol.PROGRESS_FILE)
                self._progress = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._progress, line.encode() + b"\n")
        except OSError:
            pass  # the disk is full or the folder is gone: the trial's result will report it, and the program continues
