"""Decides the last step of a trial, which is the same in all ranks: if one rank exited earlier, the others would hang."""

from __future__ import annotations

from typing import Optional

from . import protocol
from .announcement import Announcement, num_ahead
from .context import TrialContext

INSPECT_STEPS = 5  # mode "inspect" ends after these: every optimizer has stepped, and the steps are enough for a rough timing


class LastStep:
    """The last step of a trial; if there are several ranks, rank 0 announces its number."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._number: Optional[int] = None
        self._announcement = Announcement(context, protocol.STOP_FILE)

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
            self._number = context.num_steps + num_ahead(context) + self._num_steps_after()
            self._announcement.tell(self._number)
            self._look_at_communication()
        elif (step := self._announcement.heard()) is not None:
            self._number = step
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
