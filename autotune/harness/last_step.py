"""Lets rank 0 announce the number of a step, mostly the last one, to the other ranks before any rank reaches it.

All ranks must exit after the same step: if one exited earlier, the others would hang.

Rank 0 writes the number to a file in the trial's folder. On several nodes it also puts it into the store of the process group,
because a new file in a shared folder may be invisible for half a minute: NFS caches that a file does not exist.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any, Optional

from . import protocol
from .context import TrialContext
from .process import num_nodes

AHEAD = 2  # rank 0 announces the number at least this many steps ahead; ranks run in lockstep, so all ranks see it in time
ASK_EVERY_S = 0.1  # pause between requests to the store, each of which goes through the network
AHEAD_S = 0.3  # on several nodes, the announced step is at least this many seconds ahead
INSPECT_STEPS = 5  # mode "inspect" ends after this many steps: every optimizer has stepped, and a rough timing is possible


class Announcement:
    """The number of a step, which rank 0 announces once, in the file `name` in the trial's folder."""

    def __init__(self, context: TrialContext, name: str) -> None:
        self._file, self._key = os.path.join(context.spec.folder, name), f"autotune/{name}"
        self._is_spread = num_nodes(os.environ) > 1
        self._next_s = 0.0

    def tell(self, step: int) -> None:
        """Tells the other ranks the number; called by rank 0."""
        protocol.write_json(self._file, {"step": step})
        if self._is_spread:
            try:
                _store().set(self._key, str(step))
            except Exception:  # a process group without a store: the other ranks can still read the file
                return

    def heard(self) -> Optional[int]:
        """Returns the number once rank 0 has announced it, None until then. Called after every step by the other ranks."""
        if os.path.exists(self._file):
            with open(self._file, encoding="utf-8") as file:
                return int(json.load(file)["step"])
        now_s = time.monotonic()
        if not self._is_spread or now_s < self._next_s:
            return None
        self._next_s = now_s + ASK_EVERY_S
        try:
            store = _store()
            return int(store.get(self._key)) if store.check([self._key]) else None
        except Exception:  # a process group without a store, or rank 0 has ended
            return None


def num_ahead(context: TrialContext) -> int:
    """Returns how many steps ahead the announced step must be, so that all ranks know it in time."""
    num = AHEAD + context.clock.run_ahead
    if num_nodes(os.environ) == 1:
        return num
    ends_s = context.window.steps["end_s"][-9:]
    step_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else 0.0
    return num + (math.ceil(AHEAD_S / step_s) if step_s > 0 else 0)


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


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
        """Returns how many steps after the window are needed to time communication; 0 if it is not timed."""
        context, meter = self._context, self._context.window.meter
        is_wanted = context.spec.mode == "measure" and not context.window.is_cut_off
        window = meter.window() if meter is not None and is_wanted else None
        return 0 if window is None else int(context.communication.num_steps(window.seconds / max(1, window.steps)))

    def _look_at_communication(self) -> None:
        context = self._context
        if context.spec.mode == "measure":
            context.communication.begin(is_compiled=context.modules.num_graphs() > 0)
