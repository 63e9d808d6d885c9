"""Begins a pass of mode "explain" after the warm-up, in all ranks at the same step, and ends it.

A pass observes the steps of one trial: it samples lines, runs a profiler or measures memory (documents.py).
"""

from __future__ import annotations

import faulthandler
import os
import time
from typing import Optional

from .. import protocol
from ..context import TrialContext
from ..last_step import Announcement, num_ahead
from ..meter import WARMUP
from .base import Pass
from .documents import LINES, MEMORY, PASSES, document_file

BEGIN_FILE = "explain.json"  # {"step": n}: rank 0 tells the other ranks after which step all begin the pass
WARMUP_MAX_S = 20.0  # this long after the first step, the pass begins even if the steps are not steady
NOT_STEADY = f"the steps were not steady {WARMUP_MAX_S:g} s after the first step: the pass began anyway"
CUT_SHORT = "the program ended by itself in the middle of the pass"


class Explained:
    """The pass of this trial, from the first step to its document."""

    def __init__(self, context: TrialContext) -> None:
        if not faulthandler.is_enabled():  # if the pass makes the program crash, the log then shows where
            faulthandler.enable(file=2)
        self._context = context
        self._pass = _made(context)
        self._begin_step: Optional[int] = None
        self._has_begun = self._is_written = False
        self._first_s = 0.0
        self._announcement = Announcement(context, BEGIN_FILE)

    @property
    def is_over(self) -> bool:
        """Whether the pass has observed enough, so that the program may end."""
        return self._pass.is_over

    @property
    def looks_at_every_step(self) -> bool:
        """Whether `look` must be called after every step."""
        return self._pass.which != LINES

    def look(self) -> None:
        """Begins the pass once it is due; after that, reports the steps to it.

        If `looks_at_every_step` is true, or if there are several ranks, this is called after every step. Otherwise, it is
        called after each of the first steps; after these, calls are at least `LOOK_S` seconds apart (session.py).
        """
        if self._has_begun:
            self._pass.step_done()
        elif self._is_due():
            self._has_begun = True
            self._pass.begin()

    def leave_out(self, samples: float, wait_s: float) -> None:
        """Leaves the time since the last step out of the pass, because the program evaluated its model; see `Pass`."""
        if self._has_begun:
            self._pass.leave_out(samples, wait_s)

    def _is_due(self) -> bool:
        context = self._context
        # Joint processes (peers.py) do not wait for each other, so each of them begins the pass at its own time.
        if context.world_size == 1 or context.peers.is_joint:
            return self._is_warm()
        if self._begin_step is None:
            if context.rank == 0 and self._is_warm():
                self._begin_step = context.num_steps + num_ahead(context)
                self._announcement.tell(self._begin_step)
            elif context.rank != 0:
                self._begin_step = self._announcement.heard()
        return self._begin_step is not None and context.num_steps >= self._begin_step

    def _is_warm(self) -> bool:
        meter = self._context.window.meter
        if meter is not None and meter.phase != WARMUP:
            return True
        self._first_s = self._first_s or time.monotonic()
        is_late = time.monotonic() - self._first_s > WARMUP_MAX_S
        if is_late:
            self._pass.notes.append(NOT_STEADY)
        return is_late

    def finish(self) -> None:
        """Writes the document; called before this rank's result is written."""
        if not self._has_begun or self._is_written:
            return
        self._is_written = True
        # If rank 0 has announced the last step, it has observed enough: the program did not end by itself.
        if not self._pass.is_over and not self._context.last_step.is_announced:
            self._pass.notes.append(CUT_SHORT)
        document = self._pass.finish()
        if document is not None:
            document.notes = list(dict.fromkeys([*document.notes, *self._pass.notes]))
            name = document_file(self._pass.which, self._context.rank)
            protocol.write_json(os.path.join(self._context.spec.folder, name), document)


def _made(context: TrialContext) -> Pass:
    which = context.spec.explain
    if which not in PASSES:
        raise ValueError(f"explain: no such pass, got {which!r}. One of {', '.join(PASSES)}")
    if which == LINES:
        from .lines import LinesPass

        return LinesPass(context)
    if which == MEMORY:
        from .memory import MemoryPass

        return MemoryPass(context)
    from .trace import TracePass

    return TracePass(context)
