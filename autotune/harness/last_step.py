"""After which step a trial is over, in all ranks the same: leaving one by one would deadlock the others' collectives."""

from __future__ import annotations

import json
import os
from typing import Any, Optional

from . import protocol

INSPECT_STEPS = 5  # every optimizer has had its turn, and there are steps to time roughly
ANNOUNCE_AHEAD = 2  # rank 0 announces the last step this many steps ahead: every rank sees it in time (collectives keep step)


class LastStep:
    """The last step of a trial; of several ranks, rank 0 announces it in a file."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._number: Optional[int] = None
        self._file = os.path.join(session.spec.folder, protocol.STOP_FILE)

    @property
    def is_announced(self) -> bool:
        """Whether rank 0 has announced it: the window is over."""
        return self._number is not None

    def is_enough(self) -> bool:
        """Returns whether this process has made all the steps that it needs."""
        session = self._session
        return bool(session.num_steps >= INSPECT_STEPS if session.spec.mode == "inspect" else session.window.is_full)

    def is_reached(self) -> bool:
        """Returns whether the step that was just made was the last one; called after every step that is looked at."""
        session = self._session
        if session.peers.is_joint:
            return bool(session.peers.is_over())
        if session.spec.mode == "inspect" or session.world_size == 1:
            return self.is_enough() and (session.window.is_cut_off or not session.peers.is_waiting())
        if self._number is not None:
            if session.communication.is_looking:
                session.communication.step_done()
        elif session.rank == 0 and session.window.is_full:
            self._number = session.num_steps + ANNOUNCE_AHEAD + session.clock.run_ahead + self._num_steps_after()
            protocol.write_json(self._file, {"step": self._number})
            self._look_at_communication()
        elif os.path.exists(self._file):
            with open(self._file, encoding="utf-8") as file:
                self._number = int(json.load(file)["step"])
            self._look_at_communication()
        return self._number is not None and session.num_steps >= self._number

    def _num_steps_after(self) -> int:
        session, meter = self._session, self._session.window.meter
        is_wanted = session.spec.mode == "measure" and not session.window.is_cut_off
        window = meter.window() if meter is not None and is_wanted else None
        return 0 if window is None else int(session.communication.num_steps(window.seconds / max(1, window.steps)))

    def _look_at_communication(self) -> None:
        session = self._session
        if session.spec.mode == "measure":
            session.communication.begin(is_compiled=session.modules.num_graphs() > 0)
