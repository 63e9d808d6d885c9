"""Monitors a node from the tuner's side, by asking the agent (node.py) that runs there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from autotune.clock import Clock
from autotune.harness.protocol import Progress, RankResult
from autotune.launchers.link import Message
from autotune.launchers.messages import Watched
from autotune.launchers.transport import Node, NodeLost
from autotune.monitors.cpu import CpuUse
from autotune.monitors.disturbances import MIN_WINDOW_S, Disturbance
from autotune.monitors.watch import MachineWatch
from autotune.plain_json import from_json

ANSWER_S = 60.0  # longest wait for an answer, in addition to the time that the question itself may take


class NodeWatch(MachineWatch):
    """The monitor of a node. The agent observes the running trial; this class holds the agent's observations.

    Attributes:
        seen: observations in the measurement window of the last trial.
    """

    def __init__(self, node: Callable[[], Node | None], clock: Clock) -> None:
        self.seen = Watched()
        self._node, self._clock = node, clock

    def follow(self, results: Sequence[RankResult]) -> None:
        """Does nothing: the agent calls `follow` of its own monitor."""

    def before(self, *, max_s: float = 30.0) -> str:
        """Waits at most `max_s` for a free device; returns what still uses it, or "" if nothing does or no node answers."""
        self.seen = Watched()
        return str(self._ask("before", max_s + ANSWER_S, max_s=max_s).get("held", ""))

    def look(self, progress: Progress | None) -> None:
        """Does nothing: the agent calls `look` of its own monitor."""

    def ended(self) -> None:
        """Does nothing: the agent calls `ended` of its own monitor."""

    def disturbances(self) -> list[Disturbance]:
        """Returns what slowed the trial down in its measurement window."""
        return self.seen.disturbances

    @property
    def cpu_use(self) -> CpuUse | None:
        """CPU use and bytes read in the measurement window; None when unknown."""
        return self.seen.cpu_use

    def at_rest(self) -> list[Disturbance]:
        """Returns what would disturb a trial on the node now; blocks for MIN_WINDOW_S even if there is no node."""
        if self._node() is None:
            self._clock.sleep(MIN_WINDOW_S)
        return [from_json(one, Disturbance) for one in self._ask("at_rest", ANSWER_S).get("disturbances", [])]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the measurement window: name in the tracker -> value."""
        return self.seen.metrics

    def used_frac(self) -> float | None:
        """Returns the largest share of the device's memory seen in use; None when unknown."""
        return self.seen.used_frac

    def close(self) -> None:
        """Does nothing: the agent closes the monitor on the node."""

    def _ask(self, what: str, patience_s: float, **fields: Any) -> Message:
        """Returns the agent's answer; {} if there is no node or the node is lost. The next trial's start reports the loss."""
        if (node := self._node()) is not None:
            with contextlib.suppress(NodeLost):
                return node.ask(what, patience_s, **fields)
        return {}
