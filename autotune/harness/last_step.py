"""Decides the last step of a trial, which is the same in all ranks: if one rank left early, the others would hang."""

from __future__ import annotations

import json
import os
from typing import Optional

from . import protocol
from .context import TrialContext

INSPECT_STEPS = 5  # mode "inspect" ends after these: every optimizer has stepped, and the steps are enough for a rough timing
ANNOUNCE_AHEAD = 2  # rank 0 announces the last step this number of steps ahead; all ranks see it in time (they run in lockstep)


class LastStep:
    """The last step of a trial; if there are several ranks, rank 0 announces its number in a file."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._number: Optional[int] = None
        self._file = os.path.join(context.spec.folder, protocol.STOP_FILE)

    @property
    def is_announced(self) -> bool:
        """Whether rank 0 has announced the last step, so that the window is over."""
        return self._number is not None

    def is_enough(self) -> bool:
        """Whether this process has made all the steps that it needs."""
        context = self._context
        return bool(context.num_steps >= INSPECT_STEPS if context.spec.mode == "inspect" else context.window.is_full)

    def is_reached(self) -> bool:
        """Whether the step just made was the last one; called by `Session._look`."""
        context = self._context
        if context.peers.is_joint:
            return bool(context.peers.is_over())
        if context.spec.mode == "inspect" or context.world_size == 1:
            return self.is_enough() and (context.window.is_cut_off or not context.peers.is_waiting())
        if self._number is not None:
            if context.communication.is_looking:
                context.communication.step_done()
        elif context.rank == 0 and context.window.is_full:
            self._number = context.num_steps + ANNOUNCE_AHEAD + context.clock.run_ahead + self._num_steps_after()
            protocol.write_json(self._file, {"step": self._number})
            self._look_at_communication()
        elif os.path.exists(self._file):
            with open(self._file, encoding="utf-8") as file:
                self._number = int(json.load(file)["step"])
            self._look_at_communication()
        return self._number is not None and context.num_steps >= self._number

    def _num_steps_after(self) -> int:
        context, meter = self._context, self._context.window.meter
        is_wanted = context.spec.mode == "measure" and not context.window.is_cut_off
        window = meter.window() if meter is not None and is_wanted else None
        return 0 if window is None else int(context.communication.num_steps(window.seconds / max(1, window.steps)))

    def _look_at_communication(self) -> None:
        context = self._context
        if context.spec.mode == "measure":
            context.communication.begin(is_compiled=context.modules.num_graphs() > 0)
