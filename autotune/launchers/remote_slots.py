"""Runs trials in parallel on several nodes, or in several jobs on one node. Each slot has its own agent (node.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autotune.clock import PausableClock
from autotune.errors import BadInput
from autotune.launchers.base import Launch, Launcher, Running, Slot
from autotune.launchers.remote import RemoteLauncher, unlike
from autotune.monitors.watch import MachineWatch


class RemoteSlots(Launcher):
    """Several remote launchers as one. A trial that runs alone uses the first launcher."""

    def __init__(self, parts: Sequence[RemoteLauncher]) -> None:
        self.clock: PausableClock = PausableClock()
        self._parts, self._are_ready = list(parts), False
        share = _Share(self.clock, lambda: any(part.is_busy for part in self._parts))
        owners: dict[str, RemoteLauncher] = {}
        for index, part in enumerate(self._parts):
            part.join(str(index + 1), share, owners)

    def beside(self) -> list[Launcher]:
        """Returns the launchers of the slots."""
        return list(self._parts)

    def slots(self) -> list[Slot]:
        """Returns [] until all slots have been ready at the same time; after that, the ready ones. See `Launcher.slots`."""
        found = [slot for part in self._parts for slot in part.slots()]
        if self._are_ready:
            return found
        if len(found) < len(self._parts):
            self.clock.pause()  # waiting for the other slots must not use up the study's budget
            return []
        if problems := [problem for slot in found[1:] for problem in unlike(found[0], slot, has_begun=False)]:
            self.close()
            raise BadInput(problems)
        self._are_ready = True
        self.clock.go_on()
        return found

    def why_waiting(self) -> str:
        """Returns why a slot waits for a node.

        Once all slots have been ready, returns only why the first slot waits, because trials that run alone need that slot.
        """
        parts = self._parts[:1] if self._are_ready else self._parts
        return next(filter(None, (part.why_waiting() for part in parts)), "")

    def watch(self) -> MachineWatch:
        """Returns the monitor of the first slot's node."""
        return self._parts[0].watch()

    def start(self, launch: Launch) -> Running:
        """Starts the trial alone, on the first slot."""
        return self._parts[0].start(launch, is_alone=True)

    def sweep(self, study: Path) -> list[str]:
        """Ends what an earlier run has left running on the nodes. See `Launcher.sweep`."""
        return [line for part in self._parts for line in part.sweep(study)]

    def release(self) -> None:
        """Ends the agents of all slots except the first."""
        _close(self._parts[1:])

    def close(self) -> None:
        """Ends all agents."""
        self.clock.go_on()
        _close(self._parts)

    def unended(self) -> list[str]:
        """Returns a line for each slot's cluster job that may still occupy machines. See `Launcher.unended`."""
        return [line for part in self._parts for line in part.unended()]


class _Share(PausableClock):
    """The study's clock (`whole`) as the slots see it: a slot can pause it only while no slot runs a trial (`is_busy`)."""

    def __init__(self, whole: PausableClock, is_busy: Callable[[], bool]) -> None:
        super().__init__()
        self._whole, self._is_busy = whole, is_busy

    def monotonic(self) -> float:
        """Returns the study's seconds."""
        return self._whole.monotonic()

    def pause(self) -> None:
        """Pauses the clock unless a trial runs; called repeatedly while a trial waits for a node."""
        if not self._is_busy():
            self._whole.pause()

    def go_on(self) -> None:
        """Restarts the clock."""
        self._whole.go_on()


def _close(parts: Sequence[RemoteLauncher]) -> None:
    """Closes launchers in parallel, because each may take seconds, or longer if Slurm or Ray does not answer."""
    with ThreadPoolExecutor(len(parts)) as pool:
        for closing in [pool.submit(part.close) for part in parts]:
            closing.result()
