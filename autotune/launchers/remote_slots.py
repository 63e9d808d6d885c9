"""Runs trials in parallel on several nodes, or in several jobs on one node, with an agent for each slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autotune.clock import PausableClock
from autotune.errors import BadInput
from autotune.launchers.base import Launch, Launcher, Running, Slot
from autotune.launchers.remote import RemoteLauncher, RemoteRunning, unlike
from autotune.monitors.watch import MachineWatch


class RemoteSlots(Launcher):
    """Several remote launchers as one. A trial that runs alone uses the first of them."""

    def __init__(self, parts: Sequence[RemoteLauncher]) -> None:
        self.clock: PausableClock = PausableClock()
        self._parts, self._are_ready = list(parts), False
        self._alone: RemoteRunning | None = None  # the last trial that ran alone
        waiting: set[int] = set()
        owners: dict[str, RemoteLauncher] = {}
        for index, part in enumerate(self._parts):
            part.join(str(index + 1), _Share(self.clock, waiting, index, len(self._parts), lambda: self._is_alone), owners)

    def beside(self) -> list[Launcher]:
        """Returns the launchers of the slots."""
        return list(self._parts)

    def slots(self) -> list[Slot]:
        """Returns [] until all slots have been ready at the same time; after that, the ready ones. See `Launcher.slots`."""
        found = [slot for part in self._parts for slot in part.slots()]
        if self._are_ready:
            return found
        if len(found) < len(self._parts):
            self.clock.pause()  # waiting for the other slots costs no budget, like waiting for a node
            return []
        if problems := [problem for slot in found[1:] for problem in unlike(found[0], slot)]:
            self.close()
            raise BadInput(problems)
        self._are_ready = True
        self.clock.go_on()
        return found

    def why_waiting(self) -> str:
        """Returns why the first slot without a node waits for one."""
        return next(filter(None, (part.why_waiting() for part in self._parts)), "")

    def watch(self) -> MachineWatch:
        """Returns the monitor of the first slot's node."""
        return self._parts[0].watch()

    def start(self, launch: Launch) -> Running:
        """Starts the trial on the first slot."""
        self._alone = self._parts[0].start(launch)
        return self._alone

    @property
    def _is_alone(self) -> bool:
        """Whether a trial runs alone now."""
        return self._alone is not None and not self._alone.is_over

    def sweep(self, study: Path) -> list[str]:
        """Ends what an earlier run has left on the nodes."""
        return [line for part in self._parts for line in part.sweep(study)]

    def close(self) -> None:
        """Ends all agents in parallel: each may take seconds, or longer if the engine does not answer."""
        self.clock.go_on()
        with ThreadPoolExecutor(len(self._parts)) as pool:
            for closing in [pool.submit(part.close) for part in self._parts]:
                closing.result()

    def unended(self) -> list[str]:
        """Returns the lines of all slots. See `Launcher.unended`."""
        return [line for part in self._parts for line in part.unended()]


class _Share(PausableClock):
    """One slot's share of the study's clock (`whole`).

    The clock is paused while all slots are `waiting` for a node, and while a trial that runs alone waits for one: `is_alone`
    returns whether a trial runs alone now.
    """

    def __init__(
        self, whole: PausableClock, waiting: set[int], index: int, num: int, is_alone: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self._whole, self._waiting, self._index, self._num, self._is_alone = whole, waiting, index, num, is_alone

    def monotonic(self) -> float:
        """Returns the study's seconds."""
        return self._whole.monotonic()

    def pause(self) -> None:
        """Records that this slot has no node; called repeatedly while a trial waits for one."""
        self._waiting.add(self._index)
        if len(self._waiting) == self._num or self._is_alone():
            self._whole.pause()

    def go_on(self) -> None:
        """Records that this slot has a node, or needs none."""
        self._waiting.discard(self._index)
        self._whole.go_on()
