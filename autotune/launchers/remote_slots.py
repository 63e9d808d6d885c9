"""Runs trials in parallel on several nodes, or in several jobs on one node, with an agent for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autotune.clock import PausableClock
from autotune.errors import BadInput
from autotune.launchers.base import Launch, Launcher, Running, Slot
from autotune.launchers.remote import RemoteLauncher, unlike
from autotune.monitors.watch import MachineWatch


class RemoteSlots(Launcher):
    """Several remote launchers as one. A trial that runs alone uses the first of them."""

    def __init__(self, parts: Sequence[RemoteLauncher]) -> None:
        self.clock: PausableClock = PausableClock()
        self._parts, self._are_ready = list(parts), False
        for number, part in enumerate(self._parts, 1):
            part.join(str(number), _Share(self.clock, [other for other in self._parts if other is not part]))

    def beside(self) -> list[Launcher]:
        """Returns the launchers of the slots."""
        return list(self._parts)

    def slots(self) -> list[Slot]:
        """Returns [] until all slots were ready simultaneously; from then on, those that are ready. See `Launcher.slots`."""
        found = [slot for part in self._parts for slot in part.slots()]
        if self._are_ready:
            return found
        if len(found) < len(self._parts):
            self.clock.pause()  # waiting for the other slots costs no budget either
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
        return self._parts[0].start(launch)

    def sweep(self, study: Path) -> list[str]:
        """Ends what an earlier run has left on the nodes."""
        return [line for part in self._parts for line in part.sweep(study)]

    def close(self) -> None:
        """Ends all agents, at the same time: each may take seconds, and more if the engine does not answer."""
        self.clock.go_on()
        with ThreadPoolExecutor(len(self._parts)) as pool:
            for closing in [pool.submit(part.close) for part in self._parts]:
                closing.result()

    def unended(self) -> list[str]:
        """Returns the lines of all slots. See `Launcher.unended`."""
        return [line for part in self._parts for line in part.unended()]


class _Share(PausableClock):
    """One slot's share of the study's clock (`whole`), which is paused only while no trial runs on the other slots.

    If a trial that runs alone waits for a new node, nothing else is done meanwhile, even if other slots have nodes.
    """

    def __init__(self, whole: PausableClock, others: Sequence[RemoteLauncher]) -> None:
        super().__init__()
        self._whole, self._others = whole, others

    def monotonic(self) -> float:
        """Returns the study's seconds."""
        return self._whole.monotonic()

    def pause(self) -> None:
        """Pauses the study's clock, unless a trial runs on another slot; called again and again while this slot waits."""
        if not any(other.is_training for other in self._others):
            self._whole.pause()

    def go_on(self) -> None:
        """Restarts the study's clock: this slot has a node, begins a trial, or needs no node."""
        self._whole.go_on()
