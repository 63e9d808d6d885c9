"""Decides when trials run: search trials in parallel if that does not disturb them, all others alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from autotune.clock import Clock
from autotune.errors import NoNode
from autotune.records import Kind
from autotune.trials.places import Place
from autotune.trials.runner import Finished, Request, StoppedNow, TrialRunner
from autotune.trials.running import RunningTrial

Take = Callable[[Finished], None]
T = TypeVar("T")


class Ending(Exception):
    """The study ends early and keeps its measurements. Carries the reason, "" if the user requested the end."""


class Schedule:
    """Runs the trials of a study. With one slot, two trials never run at the same time.

    Attributes:
        num_slots: how many trials may run in parallel; 1 until a calibration allows more (study/interference.py).

    Args:
        runner: launches and records the trials.
        add: called with every recorded trial, finished or stopped by the user.
        while_waiting: called after each poll in which no trial has ended.
        clock, poll_s: the study's clock, and the pause between two polls.
    """

    def __init__(
        self, runner: TrialRunner, add: Take, while_waiting: Callable[[], None], *, clock: Clock, poll_s: float
    ) -> None:
        self.num_slots = 1
        self._runner, self._add, self._while_waiting = runner, add, while_waiting
        self._clock, self._poll_s = clock, poll_s
        self._running: dict[RunningTrial, Take] = {}  # in the order in which they began

    @property
    def num_running(self) -> int:
        """Number of running trials."""
        return len(self._running)

    def run(self, request: Request, take: Take) -> None:
        """Runs a trial alone, once all running trials have finished. Calls `take` with the finished trial.

        Raises:
            Ending: the user stopped it; running trials were ended and recorded.
            FolderLost, BadInput: as `RunningTrial.look`.
        """
        self.drain()
        self._begin(request, take, self._runner.alone)
        self.drain()

    def begin(self, request: Request, take: Take) -> None:
        """Starts a trial once a slot is free, and returns.

        Once the trial has ended, the next method that waits for a trial, such as `drain`, calls `take` with it.

        Raises:
            Ending, FolderLost, BadInput: as `run`.
        """
        self.make_room()
        self._begin(request, take, self._free()[0] if self.num_slots > 1 else self._runner.alone)

    def run_beside(self, request: Callable[[], Request], places: Sequence[Place], take: Take) -> None:
        """Runs a trial on each of the given slots, all in parallel. Calls `take` with each finished trial.

        Raises:
            Ending, FolderLost, BadInput: as `run`.
        """
        self.drain()
        for place in places:
            self._begin(request(), take, place)
        self.drain()

    def leave_out(self, slots: Collection[str]) -> None:
        """Starts no further trials on these slots, given by number; no trial may run there now."""
        self._runner.leave_out(slots)
        self.num_slots = max(1, min(self.num_slots, len(self._runner.beside)))

    def stay_alone(self) -> None:
        """Waits until no trial runs, and gives back all slots but the first: from now on, all trials run alone."""
        self.drain()
        self.num_slots = 1
        self._runner.release_slots()

    def make_room(self) -> None:
        """Waits until a slot is free."""
        while len(self._running) >= self.num_slots:
            self._look()

    def wait_for_one(self) -> bool:
        """Waits until one of the running trials has finished; returns False if none runs."""
        num = len(self._running)
        while num and len(self._running) >= num:
            self._look()
        return num > 0

    def drain(self) -> None:
        """Waits until no trial runs."""
        while self._running:
            self._look()

    def _free(self) -> list[Place]:
        """Returns the slots on which no trial runs."""
        taken = {trial.place for trial in self._running}
        return [place for place in self._runner.beside if place not in taken]

    def _begin(self, request: Request, take: Take, place: Place) -> None:
        begun = self._guarded(lambda: RunningTrial(self._runner, request, place))
        self._running[begun] = take
        for trial in self._running:
            trial.neighbours = max(trial.neighbours, len(self._running) - 1)

    def _look(self) -> None:
        """Polls each running trial once, then passes on the finished ones. An error is raised only after all of this."""
        over: list[tuple[Finished, Take]] = []

        def steps() -> Iterator[Callable[[], None]]:
            for trial, take in list(self._running.items()):
                yield functools.partial(self._poll, trial, take, over)
            for finished, take in over:
                yield functools.partial(take, finished)

        _do_all(steps())
        if not over:
            self._while_waiting()
            self._guarded(lambda: self._clock.sleep(self._poll_s))

    def _poll(self, trial: RunningTrial, take: Take, over: list[tuple[Finished, Take]]) -> None:
        """Polls a trial, unless it was ended because of another trial. If it has finished, adds it to `over`."""
        if trial in self._running and (finished := self._guarded(lambda: self._looked(trial, over))) is not None:
            del self._running[trial]
            over.append((finished, take))
            self._add(finished)

    def _looked(self, trial: RunningTrial, over: Sequence[tuple[Finished, Take]] = ()) -> Finished | None:
        """Polls a trial. A search trial that waits for a node moves to a free slot that has one.

        If there is no node for one of several slots, the study goes on without this slot, unless it is the first. Its search
        trial waits until it can move, or until its time is up.
        """
        try:
            if self._may_move(trial) and (place := self._ready_place(over)):
                trial.move(place)
            elif self._may_move(trial) and self._has_no_slot(trial) and not self._is_late(trial):
                return None
            return trial.look()
        except NoNode as lost:
            slot = trial.place.number
            if not self._runner.can_do_without(slot):
                raise
            self._runner.listener.notice(f"The study goes on without slot {slot}: {lost}")
            self.leave_out([slot])
            # A search trial waits for another slot. Any other trial was stopped, and `look` returns its record.
            return None if self._may_move(trial) else trial.look()

    def _may_move(self, trial: RunningTrial) -> bool:
        is_search = trial.request.kind is Kind.search and trial.place is not self._runner.alone
        return is_search and (trial.is_waiting or self._has_no_slot(trial))

    def _has_no_slot(self, trial: RunningTrial) -> bool:
        """Whether a trial's slot was left out before the trial could begin there."""
        return trial.place is not self._runner.alone and trial.place not in self._runner.beside

    def _is_late(self, trial: RunningTrial) -> bool:
        return trial.request.ends_s is not None and self._clock.monotonic() >= trial.request.ends_s

    def _ready_place(self, over: Sequence[tuple[Finished, Take]]) -> Place | None:
        """Returns a free slot that does not wait for a node; None if there is none.

        Leaves out the slots of `over`: when these trials are passed on, their devices may be tested and left out.
        """
        tested = {finished.record.slot for finished, _ in over}
        return next((each for each in self._free() if each.name not in tested and not each.launcher.why_waiting()), None)

    def stop(self) -> None:
        """Ends and records every running trial, because the user asked to."""
        running, self._running = self._running, {}
        requests = (trial.request_stop for trial in running)  # their grace periods pass at the same time
        _do_all([*requests, *(functools.partial(self._stop, trial) for trial in running)])

    def _stop(self, trial: RunningTrial) -> None:
        try:
            self._add(trial.stop())
        except StoppedNow as stopped:
            self._add(stopped.finished)
        except BaseException:
            if kept := trial.kept:  # the trial's record is on disk: a listener raised the error
                self._add(kept)
            raise

    def _abandon(self) -> None:
        """Ends every running trial after a fault. Records only those that were measured by then."""
        running, self._running = self._running, {}
        for trial in running:
            with contextlib.suppress(Exception):  # the faulty trial may raise its error again; the caller already raises it
                trial.abandon()
            with contextlib.suppress(Exception):
                if kept := trial.kept:
                    self._add(kept)

    def _guarded(self, step: Callable[[], T]) -> T:
        """Returns the result of a step; ends all running trials if the user interrupts the step or it fails."""
        try:
            return step()
        except StoppedNow as stopped:
            number = stopped.finished.record.number
            self._running = {trial: take for trial, take in self._running.items() if trial.request.number != number}
            self._add(stopped.finished)
            self.stop()
            raise Ending from stopped
        except KeyboardInterrupt:
            if not self._running:  # no process to end: the trial that was to begin has not started one
                raise
            self.stop()
            raise Ending from None
        except BaseException:
            self._abandon()
            raise


def _do_all(steps: Iterable[Callable[[], None]]) -> None:
    """Runs all steps, and then raises the first error that occurred."""
    faults: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as fault:
            faults.append(fault)
    if faults:
        raise faults[0]
